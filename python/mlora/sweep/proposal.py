"""What a sweep proposes to its run, and what of it a run has begun."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mlora.store.queue import TaskQueue


@dataclass(frozen=True)
class Proposal:
    """A trial to begin or to prune; part of the journal's entries."""

    task: str  # its name
    # what a submission would hold, and what Optuna keeps of the trial; None = prune it
    trial: Mapping[str, Any] | None


def trials_begun(queue: TaskQueue, until: int | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields name and content of each trial that a run began, by its journal up to iteration `until`."""
    for iteration, entry in queue.entries().items():
        if until is None or iteration <= until:
            for proposal in entry.get("proposals", ()):
                if proposal["trial"] is not None:
                    yield proposal["task"], proposal["trial"]
