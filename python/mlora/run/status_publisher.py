"""Publishes what `mlora status` shows of a run at work besides metrics: who waits, predicted memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mlora.errors import RunError
from mlora.run.task_table import TaskTable
from mlora.store.queue import TaskQueue
from mlora.tasks.task import Task

EVERY = 5.0  # seconds between two publications, at least


class StatusPublisher:
    """Publishes changes in the run's queue; no decision of the run depends on it.

    Predictions ask only fits that exist already. If the queue cannot be written, a warning says so once, and
    nothing more is published.
    """

    def __init__(self, queue: TaskQueue, table: TaskTable) -> None:
        self._queue, self._table = queue, table
        self._next, self._failed = 0.0, False
        self._shown: tuple[dict[str, Any], dict[str, Any]] | None = None

    def show(self, *, now: bool = False) -> None:
        """Publishes changes if some time has passed or `now`."""
        if self._failed or (time.monotonic() < self._next and not now):
            return
        shown = {task.name: self._view(task) for task in self._table.alive()}, self._run()
        try:
            if shown != self._shown:
                self._queue.show(*shown)
        except RunError as error:
            self._table.reporter.warn(
                f"{error}; `mlora status` does not show who waits, nor memory, any more"
            )
            self._failed = True
            return
        self._shown = shown
        self._next = time.monotonic() + EVERY

    def _view(self, task: Task) -> dict[str, Any]:
        memory, state = self._table.memory, task.progress.state
        waits = state == "running" and task.name not in self._table.admission.slots
        view: dict[str, Any] = {"state": "waiting" if waits else state}
        if memory:
            view["states_bytes"] = max(memory.adapters.admitted(task.name))
            batch = {task.name: task.usual_lengths}
            view["batch_bytes"] = max(memory.estimate.as_adopted.predict(batch, [task.name]))
        return view

    def _run(self) -> dict[str, Any]:
        """Returns the memory of the fullest stage: all states, and the usual micro-batches held at once."""
        memory, slots = self._table.memory, self._table.admission.slots
        if memory is None:
            return {}
        batches: dict[int, dict[str, Sequence[int]]] = {}
        for place, members in self._table.members().items():
            batches[place] = {task.name: task.usual_lengths for task in members}
        # includes tasks that have just ended: the estimate knows this mixture
        among = [name for name in slots if memory.adapters.knows(name)]
        sizes = [memory.estimate.as_adopted.predict(batch, among) for batch in batches.values()]
        states = [memory.adapters.admitted(name) for batch in batches.values() for name in batch]
        used = [
            base + sum(own[place] for own in states) + sum(sorted(size[place] for size in sizes)[-held:])
            for place, (base, held) in enumerate(zip(memory.base, memory.room().held, strict=True))
        ]
        fullest = max(range(len(used)), key=used.__getitem__)
        return {
            "memory": {
                "limit_bytes": memory.limit,
                "base_bytes": memory.base[fullest],
                "reserved_bytes": memory.reserved,
                "predicted_bytes": int(used[fullest]),
                "peak_bytes": self._table.engine.peak_memory,
            }
        }
