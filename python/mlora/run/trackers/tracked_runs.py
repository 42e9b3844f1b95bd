"""``tracking.jsonl``: the tracking runs of a run and how far they are, so that a resume goes on with them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from mlora.errors import RunError, first_fault
from mlora.store.disk import open_appended, os_errors

Kind = Literal["steps", "evaluations"]


class _Line(BaseModel):
    """One line: a tracking run has begun, or has taken the values of a step or an evaluation."""

    tracker: str
    adapter: str
    id: str | None = None
    steps: int | None = None
    evaluations: int | None = None


class TrackedRuns:
    """The file, and what was in it at first; threads of several trackers may add to it at once.

    Each line is written once a tracker has taken what it says, so a run that is cut off sends again what a
    tracker lacks, and nothing else.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._ids: dict[str, dict[str, str]] = {}
        self._taken: dict[tuple[str, str, str], int] = {}
        for number, text in enumerate(self._texts(), 1):
            try:
                self._read(_Line.model_validate_json(text))
            except ValidationError as error:
                raise RunError(
                    f"{path}:{number}: {first_fault(error)}; remove the file to begin new tracking runs"
                ) from error

    def _texts(self) -> list[bytes]:
        """Returns the lines, without an incomplete last one, which is cut off."""
        if not self._path.is_file():
            return []
        with os_errors(f"{self._path}: cannot be read"), open_appended(self._path) as file:
            whole = self._path.read_bytes()
            complete = whole[: whole.rfind(b"\n") + 1]
            file.truncate(len(complete))
        return complete.splitlines()

    def _read(self, line: _Line) -> None:
        if line.id is not None:
            self._ids.setdefault(line.tracker, {})[line.adapter] = line.id
        for kind, step in (("steps", line.steps), ("evaluations", line.evaluations)):
            if step is not None:
                self._taken[line.tracker, line.adapter, kind] = step

    def ids(self, tracker: str) -> Mapping[str, str]:
        """Returns the ids of a tracker's runs that an earlier part of the run has begun, by adapter."""
        return self._ids.get(tracker, {})

    def taken(self, tracker: str, adapter: str, kind: Kind) -> int:
        """Returns the last step that an earlier part of the run has sent; -1 = none."""
        return self._taken.get((tracker, adapter, kind), -1)

    def write(self, tracker: str, adapter: str, **more: Any) -> None:
        """Adds a line: the ``id`` of a tracking run that has begun, or the step that one has taken."""
        line = _Line(tracker=tracker, adapter=adapter, **more).model_dump_json(exclude_none=True)
        with self._lock, open_appended(self._path) as file:
            file.write(f"{line}\n".encode())


def kind_of(record: Mapping[str, Any]) -> Kind:
    """Returns what a line of ``metrics.jsonl`` has the values of."""
    return "evaluations" if "eval_loss" in record else "steps"
