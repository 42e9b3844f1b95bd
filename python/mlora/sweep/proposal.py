"""What a sweep asks of its run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mlora.queue.task_queue import TaskQueue


@dataclass(frozen=True)
class Proposal:
    """A trial that shall begin, or be pruned; part of the journal's entries.

    Args:
        task: its name.
        trial: what a submission would hold, and what Optuna keeps of the trial; none where it is pruned.
    """

    task: str
    trial: Mapping[str, Any] | None


def trials_begun(queue: TaskQueue, until: int | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the trials that a run has begun, by what it has journaled: their names, and what they hold.

    Args:
        queue: the run's.
        until: the last iteration that counts; none = all.

    Raises:
        RunError: the queue cannot be read.
    """
    for iteration, entry in queue.entries().items():
        if until is None or iteration <= until:
            for proposal in entry.get("proposals", ()):
                if proposal["trial"] is not None:
                    yield proposal["task"], proposal["trial"]
