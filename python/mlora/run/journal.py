"""The journal of decisions: written before they are carried out, repeated after a kill."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from mlora.config.run_config import RunConfig
from mlora.queue.task_queue import TaskQueue
from mlora.tasks.groups import slot_count


class Journal:
    """Records decisions in a run's queue, and says when to repeat them after a kill.

    There is one entry for each iteration, and a checkpoint holds the decisions up to its iteration. So a
    second decision at a boundary, or one right after a checkpoint, is recorded ``at_once``: under the next
    iteration, in which no task takes part.

    Args:
        iteration: made so far; no more decisions are recorded under it.
        entries: written after the checkpoint that the run resumes from; they are repeated.
    """

    def __init__(self, queue: TaskQueue, iteration: int, entries: Mapping[int, Mapping[str, Any]]) -> None:
        self.queue = queue
        self._again = {number: dict(entry) for number, entry in entries.items()}
        self._decided = iteration
        queue.changed()

    @property
    def stops(self) -> list[int]:
        """Iterations at which decisions are repeated."""
        return list(self._again)

    def due(self, iteration: int, *, wanted: bool) -> int | None:
        """Returns the iteration to record a decision under at a boundary, or None if none is due.

        `wanted` counts only when no decision is left to repeat.
        """
        if self._again:
            following = self._again.get(iteration + 1)
            at_once = iteration not in self._again and following is not None and following["at_once"]
            return iteration + at_once if iteration in self._again or at_once else None
        return iteration + (iteration == self._decided) if wanted else None

    def saved(self, iteration: int) -> None:
        """Notes a checkpoint: later decisions are not in it."""
        self._decided = max(self._decided, iteration)

    def take(self, iteration: int) -> dict[str, Any] | None:
        """Returns the decision to repeat at an iteration, or None, and counts the iteration as decided."""
        self._decided = iteration
        return self._again.pop(iteration, None)

    def write(self, iteration: int, entry: Mapping[str, Any], *, at_once: bool) -> None:
        """Writes a decision; `at_once`: its iteration is one more than all groups have made."""
        self.queue.write_entry(iteration, {**entry, "at_once": at_once})


def journaled(queue: TaskQueue, config: RunConfig, after: int) -> dict[int, dict[str, Any]]:
    """Returns the entries after a checkpoint (-1 = none); forgets them if `journal_key` has changed."""
    entries = queue.entries(after)
    if all(entry["of"] == journal_key(config) for entry in entries.values()):
        return entries
    queue.forget_entries(after)
    return {}


def journal_key(config: RunConfig) -> str:
    """Returns a hash of all that decisions depend on, except tasks that come later.

    Journaled decisions are repeated only if it is the same.
    """
    adapters = [(adapter.name, adapter.priority) for adapter in config.adapters]
    sweep = config.sweep.model_dump(exclude={"places", "trials"}) if config.sweep else None
    facts = [config.pipeline.stages, slot_count(config), config.scheduler.model_dump(), adapters, sweep]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]
