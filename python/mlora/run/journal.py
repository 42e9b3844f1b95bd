"""What a run has decided at iteration boundaries: written down before it is carried out, and made again after
a kill at the same iterations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from mlora.config.run_config import RunConfig
from mlora.queue.task_queue import TaskQueue
from mlora.tasks.groups import slot_count


class Journal:
    """Decisions, in a run's queue.

    There is one entry for each iteration, and a checkpoint holds what was decided as its iteration's or
    before. So a second decision at a boundary, at once after the first, or one after a checkpoint, counts as
    that of an iteration in which nobody takes part.

    Args:
        queue: the run's.
        iteration: that the run has made; nothing more is decided as its.
        entries: written after the checkpoint that the run goes on from; they are to be made again.
    """

    def __init__(self, queue: TaskQueue, iteration: int, entries: Mapping[int, Mapping[str, Any]]) -> None:
        self.queue = queue
        self._again = {number: dict(entry) for number, entry in entries.items()}
        self._decided = iteration
        queue.changed()

    @property
    def stops(self) -> list[int]:
        """Iterations at which decisions are to be made again."""
        return list(self._again)

    def due(self, iteration: int, *, wanted: bool) -> int | None:
        """Return as which iteration's a decision is to be made at a boundary, or none where none is due.

        Args:
            iteration: that all groups have made.
            wanted: whether there is something to decide, where nothing is to be made again.
        """
        if self._again:
            following = self._again.get(iteration + 1)
            at_once = iteration not in self._again and following is not None and following["at_once"]
            return iteration + at_once if iteration in self._again or at_once else None
        return iteration + (iteration == self._decided) if wanted else None

    def saved(self, iteration: int) -> None:
        """Take note of a checkpoint: what is decided from now on is not in it.

        Args:
            iteration: of the checkpoint.
        """
        self._decided = max(self._decided, iteration)

    def take(self, iteration: int) -> dict[str, Any] | None:
        """Return what was decided at an iteration, if it is to be made again; it is made now.

        Args:
            iteration: that `due` has returned.
        """
        self._decided = iteration
        return self._again.pop(iteration, None)

    def write(self, iteration: int, entry: Mapping[str, Any], *, at_once: bool) -> None:
        """Write down a decision.

        Args:
            iteration: that `due` has returned.
            entry: plain values.
            at_once: whether it is one more than all groups have made.

        Raises:
            RunError: the file cannot be written.
        """
        self.queue.write_entry(iteration, {**entry, "at_once": at_once})


def journaled(queue: TaskQueue, config: RunConfig, after: int) -> dict[int, dict[str, Any]]:
    """Return what was decided after a checkpoint; it is forgotten where the run is another one now.

    Args:
        queue: the run's.
        config: the run's, as it is now.
        after: the checkpoint's iteration; -1 = there is none.

    Returns:
        Entries by iteration.

    Raises:
        RunError: the queue cannot be read or written.
    """
    entries = queue.entries(after)
    if all(entry["of"] == journal_key(config) for entry in entries.values()):
        return entries
    queue.forget_entries(after)
    return {}


def journal_key(config: RunConfig) -> str:
    """Name what decisions depend on beside tasks that come: they are made again only where it is the same.

    Args:
        config: the run's.
    """
    adapters = [(adapter.name, adapter.priority) for adapter in config.adapters]
    sweep = config.sweep.model_dump(exclude={"places", "trials"}) if config.sweep else None
    facts = [config.pipeline.stages, slot_count(config), config.scheduler.model_dump(), adapters, sweep]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]
