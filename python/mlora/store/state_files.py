"""Files of a run's ``states`` and ``finished``, while checkpoints need them.

``states`` holds adapters of waiting tasks and best weights; ``finished`` what longer training goes on from.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlora.engine.full_engine import full_file
from mlora.errors import RunError, file_line
from mlora.store.checkpoint import checkpoint_name, list_checkpoints
from mlora.store.disk import check_tensors, checksum_of, os_errors, read_tensors
from mlora.store.run_folder import RunFolder
from mlora.tasks.task import ALIVE

# with an ending: what a killed process had begun to write
_STATE = re.compile(r"\.?([^.]+)(?:\.best|\.full)?-\d{8,}\.(?:pt|bin)(?:\.(?:.+\.)?(?:tmp|new))?")


def best_file(name: str, step: int) -> str:
    """Returns the file name of an adapter's weights at its best evaluation; no adapter's name has a dot."""
    return f"{name}.best-{step:08d}.pt"


def own_state(file: str, tasks: Collection[str]) -> bool:
    """Whether a file of this name holds the state of one of these tasks, or began to be written as one."""
    found = _STATE.fullmatch(file)
    return found is not None and found[1] in tasks


def files_named(checkpoint: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of the state files that a checkpoint needs."""
    best = checkpoint.get("best")
    if best is None:  # older versions did not say whose weights are kept
        best = [best_file(name, task["best_step"]) for name, task in _alive(checkpoint) if task["best_step"]]
    full = checkpoint["config"].get("method") == "full"
    models = [full_file(name, task["step"]) for name, task in _alive(checkpoint) if full]
    return frozenset([*checkpoint["decisions"]["kept"].values(), *best, *models])


def _alive(checkpoint: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, task) for name, task in checkpoint["tasks"].items() if task["state"] in ALIVE]


def finished_files(checkpoint: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of the files with which a larger ``max_steps`` goes on from a checkpoint."""
    return frozenset(file for files in checkpoint["decisions"].get("longer", {}).values() for file in files)


def lost_file(folder: RunFolder, checkpoint: Mapping[str, Any], longer: Collection[str] = ()) -> str | None:
    """Returns what is wrong with a file that a checkpoint counts on; None if they are all as it found them.

    `longer` are ended adapters that go on, whose folders may be those of later steps. Older versions of mlora
    wrote fewer checksums.
    """
    try:
        for file in sorted(files_named(checkpoint)):
            if file.endswith(".pt") and ("best" in checkpoint or (folder.states / file).exists()):
                check_tensors(folder.states / file)
        for path, size, checksum in _checksums(folder, checkpoint, longer):
            found = path.stat().st_size
            more = "; remove it to go on without these answers" if path == folder.samples else ""
            if size is not None and found < size:
                fault = f"is damaged: expected {size} bytes, got {found}" if found else "is gone or empty"
                return f"{path}: {fault}{more}"
            if checksum is not None and checksum_of(path, size) != checksum:
                return f"{path}: is damaged or was changed: its checksum differs{more}"
    except (RunError, OSError) as error:
        return file_line(error) if isinstance(error, OSError) else str(error)
    return None


def _checksums(
    folder: RunFolder, checkpoint: Mapping[str, Any], longer: Collection[str]
) -> Iterator[tuple[Path, int | None, int | None]]:
    """Yields files of a run, how many of their bytes a checkpoint counts on (None: all), and the CRC-32."""
    yield folder.metrics, checkpoint["metrics_bytes"], checkpoint.get("metrics_crc32")
    if folder.samples.exists():
        yield folder.samples, checkpoint.get("samples_bytes", 0), checkpoint.get("samples_crc32")
    if checkpoint["config"].get("method") == "full":
        kept = [folder.states / file for file in checkpoint["decisions"]["kept"].values()]
        for state in (*checkpoint["adapters"].values(), *(read_tensors(path)["state"] for path in kept)):
            yield folder.states / state["file"], state.get("bytes"), state.get("crc32")
    for name, task in checkpoint["tasks"].items():
        if name not in longer and (folder.adapters / name).is_dir():
            for file, checksum in task.get("saved", {}).items():
                yield folder.adapters / name / file, None, checksum


def read_state(path: Path, key: str, stamp: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Reads the entry `key` of a state file.

    `stamp` is everything else that the file must hold. `what` names the expected content in errors.
    """
    try:
        content = read_tensors(path)
    except RunError as error:
        raise RunError(f"{error}; {stamp['task']} cannot go on") from error
    ours = isinstance(content, dict) and content.keys() == {*stamp, key}
    if not ours or any(content[name] != value for name, value in stamp.items()):
        raise RunError(f"{path}: is not {what}")
    found: dict[str, Any] = content[key]
    return found


class StateFiles:
    """The files in ``states`` and ``finished``, and which of them are still needed.

    A file is removed when no checkpoint of the run names it, neither a durable one nor one in writing. A run
    that resumes from a checkpoint writes the files again that it had written since then.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._named: dict[str, frozenset[Path]] = {}
        self._newest = ""

    def name(self, checkpoint: Mapping[str, Any]) -> None:
        """Notes which files a checkpoint names, before it is written."""
        self._newest = checkpoint_name(checkpoint["iteration"])
        before = self._files_of(self._newest)  # an old checkpoint of this name stays until the new is whole
        self._named[self._newest] = self._paths(checkpoint) | (before or frozenset())

    def prune(self, tasks: Collection[str]) -> None:
        """Removes these tasks' files that no checkpoint needs, and folders that are empty then."""
        folders = [each for each in (self._folder.states, self._folder.finished) if each.is_dir()]
        if not folders or (needed := self._needed()) is None:
            return
        for folder in folders:
            with os_errors(f"{folder}: cannot be cleaned up"):
                left = list(folder.iterdir())
                for path in [path for path in left if path not in needed and own_state(path.name, tasks)]:
                    path.unlink(missing_ok=True)
                    left.remove(path)
                if not left:
                    folder.rmdir()

    def drop(self, file: str) -> None:
        """Removes a file of ``states``, unless a checkpoint needs it."""
        path, needed = self._folder.states / file, self._needed()
        with os_errors(f"{path.parent}: cannot be cleaned up"):
            if needed is not None and path not in needed:
                path.unlink(missing_ok=True)

    def _paths(self, checkpoint: Mapping[str, Any]) -> frozenset[Path]:
        states = {self._folder.states / file for file in files_named(checkpoint)}
        return frozenset(states | {self._folder.finished / file for file in finished_files(checkpoint)})

    def _needed(self) -> frozenset[Path] | None:
        """Returns the files that checkpoints name; None if one cannot be read, as it may need any file."""
        names = {path.name for path in list_checkpoints(self._folder.checkpoints)} | {self._newest}
        found = {name: self._files_of(name) for name in names}
        self._named = {name: files for name, files in found.items() if files is not None}
        return frozenset[Path]().union(*self._named.values()) if len(self._named) == len(found) else None

    def _files_of(self, name: str) -> frozenset[Path] | None:
        """Returns the files that a checkpoint names; None if it cannot be read."""
        if name in self._named:
            return self._named[name]
        path = self._folder.checkpoints / name
        if not path.is_file():
            return frozenset()
        try:
            return self._paths(read_tensors(path, mmap=True))
        except RunError as error:  # a file that is gone was just removed to make room for a newer one
            return frozenset() if isinstance(error.__cause__, FileNotFoundError) else None
        except (KeyError, TypeError):
            return None
