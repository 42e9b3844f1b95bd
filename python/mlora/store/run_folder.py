"""The folder of a run: its files, its lock, and which files may be removed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

from pydantic import AwareDatetime, BaseModel, FiniteFloat, ValidationError, field_validator
from pydantic_core import from_json

from mlora.config.config_file import dump_config, load_config
from mlora.config.run_config import RunConfig
from mlora.config.strict import shown
from mlora.durable import sync, sync_path
from mlora.errors import RunError, first_fault, first_line
from mlora.regular_files import MOST, open_regular
from mlora.store.disk import checksum_of, lock, open_appended, os_errors, remove, write_file
from mlora.tasks.result import AdapterResult

_OF_ADAPTER = r"(adapter_config\.json|adapter_model\.safetensors|labels\.json|quantization\.json|README\.md)"
OWN_FILES = re.compile(
    r"(config\.yaml|loss\.png|(trace|times|summary|environment)\.json|timeline\.png|report\.html)"
    r"|(metrics|samples|tracking)\.jsonl|logs(/[^/.]+(/events\.out\.tfevents\.[^/]+)?)?"
    rf"|sweep\.(csv|png)|best(/{_OF_ADAPTER})?"
    r"|queue\.sqlite(-journal|\.lock)?|(states|finished)(/[^/]+-\d{8}\.(pt|bin))?|checkpoints(/step-\d{8}\.pt)?"
    rf"|adapters(/[^/]+(/{_OF_ADAPTER})?)?"
    r"|adapters/[^/]+/((generation_)?config\.json|(model-)?\d+(-of-\d+)?\.safetensors|model\.safetensors\.index\.json)"
)
# names of `mlora.durable.temporary`, and of earlier versions
TEMPORARY = re.compile(r"\.(.+?)(?:\.[0-9a-f]{8})?\.tmp|\.(best)\.old|(.+\.bin)\.new")
SCRATCH = re.compile(r"adapters/\.[^./]+\.[a-z0-9_]{8,16}")  # of `save_adapter`; no adapter's name has a dot
PATIENCE = 0.5  # seconds; `is_running` holds the lock for an instant
_NO_NUMBERS = ("adapter", "best", "skipped")  # of a line of metrics
_LARGEST = sys.float_info.max


class _Summary(BaseModel):
    """The content of ``summary.json``."""

    status: str
    seconds: FiniteFloat
    adapters: dict[str, AdapterResult]

    @field_validator("adapters")
    @classmethod
    def _possible(cls, found: dict[str, AdapterResult]) -> dict[str, AdapterResult]:
        for name, adapter in found.items():
            if not all(0 <= (steps or 0) < 2**63 for steps in (adapter.step, adapter.max_steps)):
                raise ValueError(f"{name}: has no possible number of steps")
            best = adapter.best or {"step": 0, "metric": "", "value": 0.0}
            if [type(best.get(key)) for key in ("step", "metric")] != [int, str] or "value" not in best:
                raise ValueError(f"{name}: best must have step, metric and value")
            if best["value"] is not None:
                _check_number("value", best["value"])
        return found


class _Start(BaseModel):
    """A start or a resume of a run, and what it trained with."""

    began: AwareDatetime
    iteration: int
    versions: dict[str, str]
    machine: dict[str, Any]
    warnings: list[str]


class _Environment(BaseModel):
    """The content of ``environment.json``."""

    starts: list[_Start]


class RunFolder:
    """The files of a run in its ``output_dir``."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.environment = self.path / "environment.json"
        self.report = self.path / "report.html"
        self.adapters = self.path / "adapters"
        self.checkpoints = self.path / "checkpoints"
        self.queue = self.path / "queue.sqlite"
        self.states = self.path / "states"
        self.finished = self.path / "finished"
        self.plot = self.path / "loss.png"
        self.summary = self.path / "summary.json"
        self.trials = self.path / "sweep.csv"
        self.trials_plot = self.path / "sweep.png"
        self.best = self.path / "best"
        self.logs = self.path / "logs"
        self.tracking = self.path / "tracking.jsonl"

    def check_free(self, *, overwrite: bool, inputs: list[str]) -> None:
        """Checks that a new run may write here and no process is at work, changing nothing."""
        self.check_writable()
        running = is_running(self.metrics)
        if running:
            raise RunError(f"output_dir: another process is running the run in {self.path}")
        if running is None and (summary := self.read_summary()) and summary.get("status") == "running":
            raise RunError(
                f"output_dir: {self.path} says that its run is at work, and its file system has no locks to "
                f"show whether that is so; if no process runs it, remove {self.summary}"
            )
        self.check_contents(overwrite=overwrite, inputs=inputs)

    def check_contents(self, *, overwrite: bool, inputs: list[str]) -> None:
        """Checks that nothing in the folder is in a new run's way, changing nothing.

        `overwrite` allows replacing an earlier run, unless the folder holds files that no run wrote or that
        the new run reads (`inputs`).
        """
        if not self.holds_something():
            return
        if not overwrite:
            raise RunError(
                f"output_dir: {self.path} is not empty; continue it with `mlora resume {self.path}`, "
                "replace it with --overwrite (in Python: overwrite=True), or choose another folder"
            )
        if not self.config.is_file():
            raise RunError(
                f"output_dir: {self.path} holds no config.yaml, so it is not a run folder; refusing to "
                "overwrite it"
            )
        for path, temporary in self._contents():
            own = temporary or OWN_FILES.fullmatch(str(path.relative_to(self.path)))
            if not own or path.is_symlink():
                raise RunError(
                    f"output_dir: {path} was not written by a run; move it away before --overwrite"
                )
        for used in inputs:
            if Path(used).is_relative_to(self.path):
                raise RunError(f"output_dir: --overwrite would remove {used}, which this run reads")

    def _contents(self) -> Iterator[tuple[Path, bool]]:
        """Yields all that is in the folder, and whether a killed writer left it; does not look into that."""
        for root, folders, files in os.walk(self.path):
            found = [(Path(root) / name, self._is_temporary(Path(root) / name)) for name in folders + files]
            folders[:] = [path.name for path, temporary in found[: len(folders)] if not temporary]
            yield from found

    def left_by_killed(self) -> list[Path]:
        """Returns what killed processes were writing, unless one is at work."""
        return [path for path, temporary in self._contents() if temporary]

    def _is_temporary(self, path: Path) -> bool:
        """Whether a name is one under which a run writes one of its files or folders until it is whole."""
        relative = path.relative_to(self.path)
        found = TEMPORARY.fullmatch(path.name)
        whole = relative.with_name(found[found.lastindex or 0]) if found else None
        return bool((whole and OWN_FILES.fullmatch(str(whole))) or SCRATCH.fullmatch(str(relative)))

    def check_writable(self) -> None:
        """Checks that the folder is writable, or can be made."""
        parent = self.path
        while not parent.exists() and not parent.is_symlink():
            parent = parent.parent
        if not parent.is_dir():
            raise RunError(f"output_dir: {self.path} cannot be made: {parent} is not a folder")
        with os_errors(f"output_dir: {self.path} cannot be written: {parent}"):
            tempfile.TemporaryFile(dir=parent).close()  # without a name, where the system can

    def holds_something(self) -> bool:
        """Whether the folder holds more than an empty ``metrics.jsonl``, which is only a lock."""
        if not self.path.exists():
            return False
        return any(path != self.metrics or path.stat().st_size for path in self.path.iterdir())

    def take(self, warn: Callable[[str], object]) -> Metrics:
        """Makes the folder, takes its lock, and returns the run's metrics with their content.

        Removes what killed processes were writing. `warn` is told what the file system does not do.
        """
        with os_errors(f"output_dir: {self.path} cannot be made"):
            self.path.mkdir(parents=True, exist_ok=True)
        self._check_links()
        with ExitStack() as unless_taken:
            metrics = unless_taken.enter_context(Metrics(self.metrics))
            if not metrics.locked:
                warn(
                    f"{self.path}: its file system has no locks, so nothing keeps other processes out; let "
                    "none of them train or resume this run"
                )
            with os_errors(f"{self.path}: cannot be cleaned up"):
                if not sync_path(self.path):
                    warn(
                        f"{self.path}: its file system does not tell when a new file's name is on the disk; "
                        "after a power failure the newest checkpoint may be missing"
                    )
                for path in self.left_by_killed():
                    remove(path)
            unless_taken.pop_all()
        return metrics

    def _check_links(self) -> None:
        """Raises RunError if one of the run's own folders is a link: another run may use what it leads to."""
        own = (self.checkpoints, self.states, self.finished, self.adapters, self.best, self.logs)
        for folder in (*own, *self.adapters.glob("*"), *self.logs.glob("*")):
            if folder.is_symlink():
                raise RunError(
                    f"{folder}: is a link to {folder.resolve()}; move that folder here, in its place"
                )

    def clear(self) -> None:
        """Removes the files of a run except its config and metrics, which the next run writes anew.

        The caller holds the lock, and `check_contents` has found no other files.
        """
        with os_errors(f"output_dir: {self.path} cannot be cleared"):
            # first what says that the run has finished, since this may be interrupted
            for path in (self.summary, *self.path.iterdir()):
                if path not in (self.config, self.metrics) and OWN_FILES.fullmatch(path.name):
                    remove(path)

    def check_is_run(self) -> None:
        """Raises RunError if no run is here, and says what is here instead."""
        if os.path.isfile(self.config):
            return
        if os.path.isfile(self.path):
            raise RunError(f"{self.path}: is a file; give the run's output_dir, which is a folder")
        if not os.path.exists(self.path):
            raise RunError(f"{self.path}: there is no such folder; give the run's output_dir")
        fault = (
            "its config.yaml is no regular file" if os.path.lexists(self.config) else "it has no config.yaml"
        )
        raise RunError(f"{self.path}: is not a run folder: {fault}")

    def read_config(self, overrides: Sequence[str] = ()) -> RunConfig:
        """Returns the run's config with overrides; its ``output_dir`` is where the folder is now."""
        self.check_is_run()
        return load_config(self.config, overrides).model_copy(update={"output_dir": str(self.path)})

    def write_config(self, config: RunConfig) -> None:
        """Writes the resolved config, unless it is there."""
        content = dump_config(config).encode()
        if _content(self.config) != content:
            write_file(self.config, content)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Writes ``summary.json``."""
        write_file(self.summary, (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())

    def read_summary(self) -> dict[str, Any] | None:
        """Returns ``summary.json``, or None if it is missing."""
        content = _content(self.summary)
        try:
            return None if content is None else _Summary.model_validate_json(content).model_dump()
        except ValidationError as error:
            raise RunError(
                f"{self.summary}: is not a run's summary: {first_fault(error)}; remove it, `mlora resume "
                f"{self.path}` writes it anew"
            ) from error

    def read_environment(self) -> list[dict[str, Any]]:
        """Returns the starts that ``environment.json`` holds, the first one first; empty if it is missing."""
        content = _content(self.environment)
        try:
            found = [] if content is None else _Environment.model_validate_json(content).starts
        except ValidationError as error:
            raise RunError(
                f"{self.environment}: holds no starts of a run: {first_fault(error)}; remove it, only "
                "`mlora report` reads it"
            ) from error
        return [start.model_dump() for start in found]

    def add_start(self, start: Mapping[str, Any]) -> None:
        """Adds a start or a resume to ``environment.json``."""
        content = _Environment.model_validate({"starts": [*self.read_environment(), start]})
        write_file(self.environment, f"{content.model_dump_json(indent=2)}\n".encode())

    def was_cut_off(self, since: float) -> bool:
        """Whether the run ended without a final summary, as a killed run does.

        `since` is in seconds since 1970; an older summary belongs to an earlier attempt.
        """
        try:
            summary = self.read_summary()
            written = self.summary.stat().st_mtime if summary else 0.0
        except (RunError, OSError):
            return False
        return summary is not None and summary["status"] == "running" and written >= since


class Metrics:
    """``metrics.jsonl``, open for appending and locked while a run is at work; one process at a time.

    Attributes:
        checksum: the CRC-32 of the lines so far, once the file was cut.
        locked: False = the file system has no locks.
    """

    checksum = 0

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._writing(), ExitStack() as unless_locked:
            self._file = unless_locked.enter_context(open_appended(path))
            end = time.monotonic() + PATIENCE
            while (had := lock(self._file.fileno(), fcntl.LOCK_EX)) is False:
                if time.monotonic() > end:
                    raise RunError(f"{path.parent}: another process is running this run")
                time.sleep(PATIENCE / 10)
            self.locked = had is not None
            unless_locked.pop_all()

    def _writing(self) -> AbstractContextManager[None]:
        return os_errors(f"{self._path}: cannot be written")

    def cut(self, size: int) -> None:
        """Keeps only the first `size` bytes."""
        with self._writing():
            self._file.truncate(size)
            self.checksum = checksum_of(self._path)

    def write(self, **record: Any) -> None:
        """Appends one object as a line. Raises RunError if the folder is not there any more."""
        self.check_place()
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        with self._writing():
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.checksum = zlib.crc32(line, self.checksum)

    @property
    def size(self) -> int:
        """Bytes of the lines so far."""
        return os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Makes the lines so far durable; another thread may write further ones meanwhile.

        Raises RunError if the folder is not there any more.
        """
        self.check_place()
        with self._writing():
            sync(self._file.fileno())

    def check_place(self) -> None:
        """Raises RunError if the run's folder was moved: later files would make another one in its place."""
        with self._writing():
            try:
                if os.path.samefile(self._path, self._file.fileno()):
                    return
            except (FileNotFoundError, NotADirectoryError):
                pass
        now = ""
        with suppress(OSError):  # only Linux tells
            now = os.readlink(f"/proc/self/fd/{self._file.fileno()}")
        if not now or now.endswith(" (deleted)"):
            raise RunError(f"{self._path}: was removed while the run trained, so the run ends")
        raise RunError(
            f"{self._path.parent}: was moved to {Path(now).parent} while the run trained; "
            f"`mlora resume {Path(now).parent}` goes on from its last checkpoint"
        )

    def close(self) -> None:
        """Closes the file, which frees the lock."""
        self._file.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def is_running(path: Path) -> bool | None:
    """Whether a process is at work on the run with this ``metrics.jsonl``; None if there are no locks."""
    with os_errors(f"{path}: cannot be read"):
        try:
            with open_regular(path) as file:
                had = lock(file.fileno(), fcntl.LOCK_SH)
        except FileNotFoundError:
            return False
    return None if had is None else not had


def _content(path: Path) -> bytes | None:
    """Returns the content of a file, or None if it is missing."""
    with os_errors(f"{path}: cannot be read"):
        try:
            with open_regular(path, MOST) as file:
                return file.read()
        except FileNotFoundError:
            return None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads ``metrics.jsonl``, which may be missing, without an incomplete last line."""
    return list(metrics_of(path))


def metrics_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yields what `read_metrics` returns, one line at a time: a long run's lines do not fit in memory."""
    with os_errors(f"{path}: cannot be read"), suppress(FileNotFoundError), open_regular(path) as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield _metrics_line(line, f"{path}:{number}")


def _metrics_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = from_json(line)
        if not (isinstance(record, dict) and isinstance(record.get("step"), int)):
            raise ValueError("no step")
        if not isinstance(record.get("adapter"), str):
            raise ValueError("no adapter")
        for key, value in record.items():
            if key not in _NO_NUMBERS and not (value is None and key == "grad_norm"):
                _check_number(key, value)
    except ValueError as error:
        raise RunError(f"{where}: is not a line of metrics: {first_line(error)}") from error
    return record


def _check_number(key: str, value: Any) -> None:
    """Raises ValueError unless a value is a number that a run writes."""
    if type(value) not in (int, float) or not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"{key} is {shown(value)}, not a number")
