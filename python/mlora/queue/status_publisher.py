"""Publishes what `mlora status` shows of a run at work besides metrics: who waits, predicted memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlora.engine.engine import Engine
from mlora.engine.memory_limit import MemoryLimit
from mlora.errors import RunError
from mlora.queue.task_queue import TaskQueue
from mlora.scheduler import Admission
from mlora.tasks.task import Task

EVERY = 5.0  # seconds between two publications, at least


class StatusPublisher:
    """Publishes changes in the run's queue; no decision of the run depends on it.

    Predictions ask only fits that exist already. `memory` and `limit` (bytes) are None without a limit.
    `warn` is called once if the queue cannot be written; nothing more is published then.
    """

    def __init__(
        self,
        queue: TaskQueue,
        engine: Engine,
        memory: MemoryLimit | None,
        limit: int | None,
        warn: Callable[[str], None],
    ) -> None:
        self._queue, self._engine, self._memory, self._limit = queue, engine, memory, limit
        self._warn = warn
        self._next, self._failed = 0.0, False
        self._shown: tuple[dict[str, Any], dict[str, Any]] | None = None

    def show(self, tasks: Sequence[Task], admission: Admission, *, now: bool = False) -> None:
        """Publishes changes if some time has passed or `now`; `tasks` are those that have not ended."""
        if self._failed or (time.monotonic() < self._next and not now):
            return
        shown = {task.name: self._view(task, admission) for task in tasks}, self._run(tasks, admission)
        try:
            if shown != self._shown:
                self._queue.show(*shown)
        except RunError as error:
            self._warn(f"{error}; `mlora status` does not show who waits, nor memory, any more")
            self._failed = True
            return
        self._shown = shown
        self._next = time.monotonic() + EVERY

    def _view(self, task: Task, admission: Admission) -> dict[str, Any]:
        waits = task.progress.state == "running" and task.name not in admission.slots
        view: dict[str, Any] = {"state": "waiting" if waits else task.progress.state}
        if self._memory:
            view["states_bytes"] = max(self._memory.adapters.admitted(task.name))
            batch = {task.name: task.usual_lengths}
            view["batch_bytes"] = max(self._memory.estimate.as_adopted.predict(batch, [task.name]))
        return view

    def _run(self, tasks: Sequence[Task], admission: Admission) -> dict[str, Any]:
        if self._memory is None:
            return {}
        here = [task for task in tasks if task.name in admission.slots and task.progress.state == "running"]
        places = list(enumerate(self._memory.base))
        used = [base + self._foreseen(here, admission, place) for place, base in places]
        fullest = max(range(len(used)), key=used.__getitem__)
        return {
            "memory": {
                "limit_bytes": self._limit,
                "base_bytes": self._memory.base[fullest],
                "reserved_bytes": self._memory.reserved,
                "predicted_bytes": int(used[fullest]),
                "peak_bytes": self._engine.peak_memory,
            }
        }

    def _foreseen(self, tasks: Sequence[Task], admission: Admission, place: int) -> float:
        """Returns a stage's predicted bytes: all states, and the usual micro-batches held at once."""
        assert self._memory is not None
        batches: dict[int, dict[str, Sequence[int]]] = {}
        for task in tasks:
            batches.setdefault(admission.slots[task.name], {})[task.name] = task.usual_lengths
        # includes tasks that have just ended: the estimate knows this mixture
        among = [name for name in admission.slots if self._memory.adapters.knows(name)]
        sizes = [self._predicted(batch, among, place) for batch in batches.values()]
        held = self._memory.room().held[place]
        states = sum(self._memory.adapters.admitted(task.name)[place] for task in tasks)
        return states + sum(sorted(sizes, reverse=True)[:held])

    def _predicted(self, batch: Mapping[str, Sequence[int]], among: Sequence[str], place: int) -> float:
        assert self._memory is not None
        return self._memory.estimate.as_adopted.predict(batch, among)[place]
