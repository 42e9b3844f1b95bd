"""Replaceable policies: who comes first, and who shares a slot.

A policy is a small class without state. Whatever it says, the memory limit holds: `mlora.scheduler.admission`
sees to that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from mlora.scheduler.memory_need import MemoryNeed


class Order(Protocol):
    """Who comes first."""

    def key(self, need: MemoryNeed) -> tuple[float, ...]:
        """Return what tasks are sorted by, the first one first.

        Args:
            need: the task's; its arrival, which no other task has, should be the last word.
        """


class FirstComeFirstServed:
    """The mLoRA paper's: higher priorities first, and within one the task that came first."""

    def key(self, need: MemoryNeed) -> tuple[float, ...]:
        """By priority, then by arrival."""
        return -need.priority, need.arrival


class ShortestFirst:
    """Within a priority the task with the least work left, which lowers the mean time to completion.

    As long as shorter ones come, a long task waits.
    """

    def key(self, need: MemoryNeed) -> tuple[float, ...]:
        """By priority, then by rows that are left, then by arrival."""
        return -need.priority, need.work, need.arrival


class Placement(Protocol):
    """Who shares a slot: the tasks of a slot are batched together, and slots fill a pipeline in turn."""

    def place(self, needs: Sequence[MemoryNeed], slots: int, fixed: Mapping[str, int]) -> dict[str, int]:
        """Give each task a slot.

        Args:
            needs: of tasks, the first one first.
            slots: how many there are.
            fixed: tasks that have to stay in their slots.

        Returns:
            The slot of each task by name; there is no empty slot before one that is in use, unless by what is
            fixed.
        """


class TokenBalanced:
    """Slots of about equally many rows, so that no micro-batch keeps a pipeline waiting.

    Longest processing time first (Graham, "Bounds on multiprocessing timing anomalies", 1969).
    """

    def place(self, needs: Sequence[MemoryNeed], slots: int, fixed: Mapping[str, int]) -> dict[str, int]:
        """The task with the most rows first, each into the slot with the fewest so far."""
        found = {need.name: fixed[need.name] for need in needs if need.name in fixed}
        rows = [0] * slots
        for need in needs:
            if need.name in found:
                rows[found[need.name]] += need.rows
        for need in sorted(needs, key=lambda need: -need.rows):
            if need.name not in found:
                lightest = rows.index(min(rows))
                rows[lightest] += need.rows
                found[need.name] = lightest
        return {need.name: found[need.name] for need in needs}


class InOrder:
    """Slots in turn, in the order of the tasks, whatever their rows; where some are fixed, the emptiest."""

    def place(self, needs: Sequence[MemoryNeed], slots: int, fixed: Mapping[str, int]) -> dict[str, int]:
        """The first task into the first slot, the next one into the next."""
        found = {need.name: fixed[need.name] for need in needs if need.name in fixed}
        counts = [list(found.values()).count(slot) for slot in range(slots)]
        for need in needs:
            if need.name not in found:
                found[need.name] = counts.index(min(counts))
                counts[found[need.name]] += 1
        return {need.name: found[need.name] for need in needs}


ORDERS: Mapping[str, Order] = {"fcfs": FirstComeFirstServed(), "shortest_first": ShortestFirst()}
PLACEMENTS: Mapping[str, Placement] = {"token_balanced": TokenBalanced(), "in_order": InOrder()}
