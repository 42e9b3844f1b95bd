"""Replaceable policies: which task comes first, and which tasks share a slot.

A policy is a small class without state. `mlora.scheduler.admission` keeps the memory limit, whatever a policy
says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from mlora.scheduler.memory_need import MemoryNeed


class Order(Protocol):
    """Decides which task comes first."""

    def key(self, need: MemoryNeed) -> tuple[float, ...]:
        """Returns what tasks are sorted by; the smallest key comes first.

        Args:
            need: the task's. Its arrival is unique and should be the key's last entry.
        """


class FirstComeFirstServed:
    """The mLoRA paper's order: higher priorities first, and within one the task that came first."""

    def key(self, need: MemoryNeed) -> tuple[float, ...]:
        """Sorts by priority, then by arrival."""
        return -need.priority, need.arrival


class ShortestFirst:
    """Within a priority the task with the least work left, which lowers the mean time to completion.

    A long task waits as long as shorter ones come.
    """

    def key(self, need: MemoryNeed) -> tuple[float, ...]:
        """Sorts by priority, then by rows left, then by arrival."""
        return -need.priority, need.work, need.arrival


class Placement(Protocol):
    """Decides which tasks share a slot.

    Tasks of a slot are batched together; the slots fill a pipeline in turn.
    """

    def place(self, needs: Sequence[MemoryNeed], slots: int, fixed: Mapping[str, int]) -> dict[str, int]:
        """Gives each task a slot.

        Args:
            needs: of the tasks, the first one first.
            slots: how many slots there are.
            fixed: slots of tasks that must keep theirs.

        Returns:
            The slot of each task by name. No slot before a used one is empty, unless `fixed` makes it so.
        """


class TokenBalanced:
    """Fills slots with about equally many rows, so that no micro-batch keeps a pipeline waiting.

    Longest processing time first (Graham, "Bounds on multiprocessing timing anomalies", 1969).
    """

    def place(self, needs: Sequence[MemoryNeed], slots: int, fixed: Mapping[str, int]) -> dict[str, int]:
        """Puts the task with the most rows first, each into the slot with the fewest rows so far."""
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
    """Fills slots in turn, in the order of the tasks, whatever their rows; with fixed tasks, the emptiest."""

    def place(self, needs: Sequence[MemoryNeed], slots: int, fixed: Mapping[str, int]) -> dict[str, int]:
        """Puts each task into the slot with the fewest tasks so far."""
        found = {need.name: fixed[need.name] for need in needs if need.name in fixed}
        counts = [list(found.values()).count(slot) for slot in range(slots)]
        for need in needs:
            if need.name not in found:
                found[need.name] = counts.index(min(counts))
                counts[found[need.name]] += 1
        return {need.name: found[need.name] for need in needs}


ORDERS: Mapping[str, Order] = {"fcfs": FirstComeFirstServed(), "shortest_first": ShortestFirst()}
PLACEMENTS: Mapping[str, Placement] = {"token_balanced": TokenBalanced(), "in_order": InOrder()}
