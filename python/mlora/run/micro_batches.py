"""Chooses the tasks of each micro-batch and learns from the memory that it used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlora.engine.engine import Engine
from mlora.memory.estimate import MemorySample
from mlora.run.task_table import TaskTable
from mlora.scheduler import next_batch
from mlora.scheduler.memory_need import within
from mlora.tasks.groups import Group
from mlora.tasks.task import Task


class MicroBatches:
    """The micro-batches of a run's admitted tasks."""

    def __init__(self, table: TaskTable, engine: Engine) -> None:
        self._table, self._engine, self._memory = table, engine, table.memory

    def next_batch(self, group: Group) -> list[Task]:
        """Returns the tasks for a group's next micro-batch; none of its batches may be under way."""
        running = group.running()
        if self._memory is None:
            return running
        admission = self._table.admission
        lengths = {task.name: task.next_lengths() for task in running}
        chosen = next_batch(
            lengths, admission.budget, self._memory.estimate.as_adopted, list(admission.slots)
        )
        return [task for task in running if task.name in chosen]

    def fits(self, lengths: Mapping[str, Sequence[int]]) -> bool:
        """Whether memory holds a micro-batch of admitted tasks with these sequence lengths."""
        if self._memory is None:
            return True
        admission = self._table.admission
        bounds = self._memory.estimate.as_adopted.activations(lengths, list(admission.slots))
        return within(bounds, admission.budget)

    def worth_measuring(self, chosen: Sequence[Task]) -> bool:
        """Whether the memory of the next micro-batch of these tasks should be measured."""
        if self._memory is None:
            return False
        lengths = {task.name: task.next_lengths() for task in chosen}
        return self._memory.estimate.worth_measuring(lengths, list(self._table.admission.slots))

    def passed(self, measured: Sequence[MemorySample]) -> None:
        """Learns from a batch that has passed: measured micro-batches, memory kept and peak."""
        if self._memory is None:
            return
        admission = self._table.admission
        for one in measured:
            self._memory.estimate.observe(one.lengths, list(admission.slots), one.phases)
        after = self._engine.memory_after if self._engine.idle else ()  # else stages hold other micro-batches
        names = [task.name for task in self._table.admitted()]
        self._memory.took(names, self._foreseen(), self._engine.peak_memory, after)

    def _foreseen(self) -> list[float]:
        """Returns the bytes on each stage that micro-batches under way may take: their budgets.

        A task that goes on alone beyond the limit counts with its need where that is more.
        """
        assert self._memory is not None
        admission, here = self._table.admission, self._table.admitted()
        sizes: Sequence[float] = admission.budget
        if len(admission.slots) == 1 and here:
            largest = {here[0].name: self._table.candidate(here[0]).largest}
            needs = self._memory.estimate.as_adopted.activations(largest, list(largest))
            sizes = list(map(max, sizes, needs))
        held = [min(most, admission.count) for most in self._memory.room().held]
        return [size * count for size, count in zip(sizes, held, strict=True)]
