"""Several reporters as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlora.run.reporter import Reporter
from mlora.tasks.task import Task


class Reporters(Reporter):
    """Passes each event to several reporters in turn; lines go to the first only."""

    def __init__(self, lines: Reporter, *others: Reporter) -> None:
        self._lines, self._all = lines, (lines, *others)

    def start(self, tasks: Sequence[Task]) -> None:
        for each in self._all:
            each.start(tasks)

    def step(self, task: Task, record: dict[str, Any]) -> None:
        for each in self._all:
            each.step(task, record)

    def logged(self, task: Task, record: dict[str, Any]) -> None:
        for each in self._all:
            each.logged(task, record)

    def evaluation(self, task: Task, record: dict[str, Any]) -> None:
        for each in self._all:
            each.evaluation(task, record)

    def joined(self, task: Task, tasks: Sequence[Task]) -> None:
        for each in self._all:
            each.joined(task, tasks)

    def changed(self, task: Task) -> None:
        for each in self._all:
            each.changed(task)

    def waits(self, names: Sequence[str], went_on: Sequence[str]) -> None:
        for each in self._all:
            each.waits(names, went_on)

    def note(self, line: str) -> None:
        self._lines.note(line)

    def warn(self, line: str) -> None:
        self._lines.warn(line)

    def fault(self, line: str) -> None:
        self._lines.fault(line)

    def close(self) -> None:
        """Closes the one of the lines last: others may have something to say."""
        for each in reversed(self._all):
            each.close()
