"""The tasks of a run as its files describe them: those of its config, and those submitted to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlora.queue.task_queue import RequestType, TaskQueue

ENDED = ("finished", "stopped", "cancelled", "pruned", "refused")
BECOMES = {"pause": "paused", "unpause": "running", "cancel": "cancelled"}


@dataclass
class KnownTask:
    """A task of a run.

    Attributes:
        priority: in the run's YAML, or in the task's own.
        state: ``running`` (the run may be dead), ``waiting`` for memory, ``queued`` if the run has not taken
            its submission, ``paused``, ``finished``, ``stopped``, ``cancelled``, ``pruned`` or ``refused``.
        max_steps: from its submission; None if that sets none.
        asked: requests that the run has not taken, without its submission.
        view: what the run has published of it.
    """

    name: str
    priority: int
    state: str = "running"
    max_steps: int | None = None
    asked: list[RequestType] = field(default_factory=list)
    view: Mapping[str, Any] = field(default_factory=dict)

    @property
    def will_be(self) -> str:
        """Its state once the run has taken all requests."""
        state = "running" if self.state in ("waiting", "queued") else self.state
        for kind in self.asked:
            if state not in ENDED:
                state = BECOMES[kind]
        return state


def known_tasks(
    own: Iterable[tuple[str, int]], summary: Mapping[str, Any] | None, queue: TaskQueue | None
) -> dict[str, KnownTask]:
    """Returns a run's tasks by name: those of its config first, then the submitted ones in their order.

    `own` are the names and priorities of the config's tasks. Raises RunError if the queue cannot be read.
    """
    tasks = {name: KnownTask(name, priority) for name, priority in own}
    taken, requests = (queue.taken(), queue.requests()) if queue else (0, [])
    views = queue.views()[0] if queue else {}
    for request in requests:
        if request.kind == "submit":
            adapter = request.content.get("adapter", {})
            state, most = "running" if request.number <= taken else "queued", adapter.get("max_steps", 0)
            task = KnownTask(request.task, adapter.get("priority", 0), state, most if most > 0 else None)
            tasks.setdefault(request.task, task)
        elif request.number > taken and request.task in tasks:
            tasks[request.task].asked.append(request.kind)
    for name, entry in (summary["adapters"] if summary else {}).items():
        task = tasks.setdefault(name, KnownTask(name, 0))
        if task.state != "queued":
            task.state = entry["state"]
    for name, view in views.items():
        if name in tasks:
            tasks[name].view = view
            if tasks[name].state == "running" and view.get("state") == "waiting":
                tasks[name].state = "waiting"
    return tasks
