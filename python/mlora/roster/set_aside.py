"""A task's adapter on and off the engine: created, set aside on disk, brought back bit for bit.

A task that gives way to others keeps its adapter, its optimizer, what it has accumulated and its counts in a
file of the run's ``states``, which carries the number of micro-batches it has taken; its place in the data
and its random numbers derive from its counts.
"""

from __future__ import annotations

import errno
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlora.checkpoint import checkpoint_name, list_checkpoints, sync_folder, write_file
from mlora.engine import Engine
from mlora.errors import RunError, first_line
from mlora.tasks import Task


def create_adapter(engine: Engine, task: Task, group: int) -> None:
    """Create a task's adapter as it is before its first step; groups go to the replicas in turn.

    Args:
        engine: where.
        task: what.
        group: the task's.

    Raises:
        ValueError: the engine refuses the adapter.
    """
    engine.create_adapter(
        task.name,
        task.lora,
        task.optim,
        init_from=task.config.init_from,
        seed=task.seed,
        replica=group % engine.replicas,
    )


def restore_adapter(
    engine: Engine, task: Task, group: int, state: Mapping[str, Any], where: str = "its checkpoint"
) -> None:
    """Create a task's adapter as it was.

    Args:
        engine: where.
        task: what.
        group: the task's.
        state: of `Engine.state_dict`.
        where: it was read.

    Raises:
        RunError: the state is not this adapter's.
    """
    try:
        create_adapter(engine, task, group)
        engine.load_state_dict(task.name, state)
    except ValueError as error:
        raise RunError(f"{task.name}: cannot be restored: {first_line(error)}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{task.name}: cannot be restored: {where} does not hold an adapter's state "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error


def set_aside(engine: Engine, task: Task, folder: Path) -> None:
    """Take a task's adapter off the engine, and keep what it needs to go on.

    Args:
        engine: that has it.
        task: whose; ``kept`` then names the file, unless it has not begun.
        folder: the run's ``states``.

    Raises:
        RunError: the file cannot be written; the adapter is as before.
    """
    import torch

    if task.progress.batches:
        name = f"{task.name}-{task.progress.batches:08d}.pt"
        content = {**_stamp(task), "state": engine.state_dict(task.name)}
        try:
            if not folder.is_dir():
                folder.mkdir(parents=True)
                sync_folder(folder.parent)
            write_file(folder / name, lambda file: torch.save(content, file))
        except (OSError, RuntimeError) as error:
            # torch reports a failed write as a RuntimeError whose context is the system's error
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            raise RunError(f"{folder / name}: cannot be saved: {cause.strerror}") from error
        task.kept = name
    engine.remove_adapter(task.name)


def bring_back(engine: Engine, task: Task, group: int, folder: Path) -> None:
    """Put a task's adapter on the engine: as it was, or new where it has not begun.

    Args:
        engine: where.
        task: whose.
        group: the task's.
        folder: the run's ``states``.

    Raises:
        ValueError: the engine refuses a new adapter.
        RunError: the file cannot be read, or is not this adapter's.
    """
    import torch

    if task.kept is None:
        create_adapter(engine, task, group)
        return
    path = folder / task.kept
    try:
        with open(path, "rb") as file:
            if not zipfile.is_zipfile(file):  # torch takes other bytes for an old format, and fails anyhow
                raise EOFError
            file.seek(0)
            content = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        # torch seeks before the start of a file that was cut short
        named = isinstance(error, OSError) and error.errno != errno.EINVAL and error.strerror
        reason = named or "it is damaged or not whole"
        raise RunError(f"{path}: cannot be read: {reason}; {task.name} cannot go on") from error
    stamp = _stamp(task)
    ours = isinstance(content, dict) and content.keys() == {*stamp, "state"}
    if not ours or any(content[key] != value for key, value in stamp.items()):
        raise RunError(f"{path}: is not the state of {task.name} after {task.progress.batches} micro-batches")
    restore_adapter(engine, task, group, content["state"], str(path))
    task.kept = None


class StateFiles:
    """The files of tasks that wait, and which of them are still needed.

    A file goes when none of the run's checkpoints names it, whether it is durable or in writing. What the
    run has set aside since is written again when it goes on from one of them.

    Args:
        folder: the run's ``states``, which may be missing.
        checkpoints: its ``checkpoints``.
    """

    def __init__(self, folder: Path, checkpoints: Path) -> None:
        self._folder, self._checkpoints = folder, checkpoints
        self._named: dict[str, frozenset[str]] = {}
        self._newest = ""

    def name(self, iteration: int, files: Iterable[str]) -> None:
        """Tell which files a checkpoint names, before it is written.

        Args:
            iteration: the checkpoint's.
            files: their names.
        """
        self._newest = checkpoint_name(iteration)
        before = self._files_of(self._newest)  # of this name, until the new one is whole
        self._named[self._newest] = frozenset(files) | before if before is not None else frozenset(files)

    def prune(self) -> None:
        """Remove files that nobody needs, and the folder when it is empty.

        Raises:
            RunError: the system refuses.
        """
        if not self._folder.is_dir():
            return
        names = {path.name for path in list_checkpoints(self._checkpoints)} | {self._newest}
        found = {name: self._files_of(name) for name in names}
        self._named = {name: files for name, files in found.items() if files is not None}
        if len(self._named) < len(found):
            return  # a checkpoint that cannot be read may need any of them
        needed = frozenset[str]().union(*self._named.values())
        try:
            for path in self._folder.iterdir():
                if path.name not in needed:
                    path.unlink(missing_ok=True)
            if not needed:
                self._folder.rmdir()
        except OSError as error:
            raise RunError(f"{self._folder}: cannot be tidied: {error.strerror}") from error

    def _files_of(self, name: str) -> frozenset[str] | None:
        """The files that a checkpoint names; none where it cannot be read."""
        import torch

        if name in self._named:
            return self._named[name]
        path = self._checkpoints / name
        if not self._folder.is_dir() or not path.is_file():
            return frozenset()
        try:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            return frozenset(checkpoint["roster"]["kept"].values())
        except FileNotFoundError:
            return frozenset()  # it has just made room for a newer one
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, KeyError, TypeError):
            return None


def _stamp(task: Task) -> dict[str, Any]:
    """What tells a task's file from others'."""
    return {"task": task.name, "batches": task.progress.batches}
