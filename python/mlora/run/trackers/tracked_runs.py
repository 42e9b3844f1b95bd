"""``tracking.json``: which tracking runs a run has begun, so that a resume goes on with them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from mlora.errors import RunError, first_fault
from mlora.files.disk import os_errors, write_file


class _Content(BaseModel):
    """The content of the file.

    Attributes:
        runs: the ids of tracking runs, by tracker and adapter.
        told: the last step whose values were sent before a resume, by adapter and by what they are values of
            (``steps`` or ``evaluations``).
    """

    runs: dict[str, dict[str, str]] = {}
    told: dict[str, dict[str, int]] = {}


class TrackedRuns:
    """The file and its content; threads of several trackers may call it at once."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._content = _Content()
        if path.is_file():
            with os_errors(f"{path}: cannot be read"):
                text = path.read_bytes()
            try:
                self._content = _Content.model_validate_json(text)
            except ValidationError as error:
                raise RunError(
                    f"{path}: {first_fault(error)}; remove the file to begin new tracking runs"
                ) from error

    def known(self, tracker: str, adapter: str) -> str | None:
        """Returns the id of an adapter's tracking run, if it has one."""
        return self._content.runs.get(tracker, {}).get(adapter)

    def begun(self, tracker: str, adapter: str, id: str) -> None:
        """Notes the id of an adapter's tracking run."""
        with self._lock:
            if self.known(tracker, adapter) != id:
                self._content.runs.setdefault(tracker, {})[adapter] = id
                self._write()

    def told(self, adapter: str, kind: str) -> int:
        """Returns the last step of which values of a kind have been sent; -1 = none."""
        return self._content.told.get(adapter, {}).get(kind, -1)

    def repeats(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Notes lines of ``metrics.jsonl`` that a resumed run will write again: they were sent."""
        with self._lock:
            for record in records:
                own = self._content.told.setdefault(record["adapter"], {})
                kind = kind_of(record)
                own[kind] = max(own.get(kind, -1), record["step"])
            self._write()

    def _write(self) -> None:
        write_file(self._path, (json.dumps(self._content.model_dump(), indent=2) + "\n").encode())


def kind_of(record: Mapping[str, Any]) -> str:
    """Returns what a line of ``metrics.jsonl`` has the values of: ``steps`` or ``evaluations``."""
    return "evaluations" if "eval_loss" in record else "steps"
