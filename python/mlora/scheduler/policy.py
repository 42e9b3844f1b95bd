"""What the scheduler knows of a task, and replaceable policies: who comes first, and who shares a slot.

A policy is a function. `mlora.scheduler.admission` keeps the memory limit, whatever a policy says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryNeed:
    """What a task asks for. Sequence lengths are in rows, sizes in bytes.

    Each stage of a pipeline is a memory of its own, such as a device.

    Args:
        name: of the task.
        priority: a higher one goes first.
        arrival: a number that grows from task to task in the order in which they come.
        work: rows still to train.
        states: bytes at each stage while the task is admitted: weights, optimizer moments, kept gradients.
        usual: sequence lengths of a usual micro-batch.
        largest: sequence lengths of the largest micro-batch still to come.
    """

    name: str
    priority: int
    arrival: int
    work: float
    states: tuple[int, ...]
    usual: tuple[int, ...]
    largest: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of a usual micro-batch."""
        return sum(self.usual)


Order = Callable[[MemoryNeed], tuple[float, ...]]
"""Returns what tasks are sorted by; the smallest comes first. A task's unique arrival should end it."""

Placement = Callable[[Sequence[MemoryNeed], int, Mapping[str, int]], dict[str, int]]
"""Gives each task a slot, given the tasks (the first one first), the number of slots, and the slots of tasks
that must keep theirs. The tasks of a slot are batched together; the slots fill a pipeline in turn. No slot
before a used one may be empty, unless tasks that keep theirs make it so."""


def first_come_first_served(need: MemoryNeed) -> tuple[float, ...]:
    """Sorts as the mLoRA paper does: by priority, then by arrival."""
    return -need.priority, need.arrival


def shortest_first(need: MemoryNeed) -> tuple[float, ...]:
    """Sorts by priority, then by rows left, then by arrival, which lowers the mean time to completion.

    A long task waits as long as shorter ones come.
    """
    return -need.priority, need.work, need.arrival


def token_balanced(needs: Sequence[MemoryNeed], slots: int, fixed: Mapping[str, int]) -> dict[str, int]:
    """Puts the task with the most rows first, each into the slot with the fewest rows so far.

    So slots have about equally many rows, and no micro-batch keeps a pipeline waiting. Longest processing
    time first (Graham, "Bounds on multiprocessing timing anomalies", 1969).
    """
    return _fill({need.name: need.rows for need in needs}, slots, fixed)


def in_order(needs: Sequence[MemoryNeed], slots: int, fixed: Mapping[str, int]) -> dict[str, int]:
    """Puts each task, in their order, into the slot with the fewest tasks so far, whatever their rows."""
    return _fill({need.name: 1 for need in needs}, slots, fixed)


def _fill(sizes: Mapping[str, int], slots: int, fixed: Mapping[str, int]) -> dict[str, int]:
    """Puts the largest task first, each into the slot with the least so far; `sizes` are by task name."""
    found = {name: fixed[name] for name in sizes if name in fixed}
    filled = [0] * slots
    for name, slot in found.items():
        filled[slot] += sizes[name]
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if name not in found:
            found[name] = filled.index(min(filled))
            filled[found[name]] += sizes[name]
    return {name: found[name] for name in sizes}


ORDERS: Mapping[str, Order] = {"fcfs": first_come_first_served, "shortest_first": shortest_first}
PLACEMENTS: Mapping[str, Placement] = {"token_balanced": token_balanced, "in_order": in_order}
