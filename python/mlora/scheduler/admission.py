"""Decides which tasks are admitted and which take part in a micro-batch: pure functions of plain data.

Both go through the tasks in the order of a policy and take each one that fits beside those taken before it.
So a task never runs while an earlier one that would fit waits. A large task that waits for others to end does
not keep smaller ones from using the memory that is free until then.

Admitted tasks keep their states in memory. Admission counts a usual micro-batch of each. A task whose next
micro-batch is longer may have to skip an iteration; `next_batch` decides that. Every admitted task fits alone
with its largest micro-batch, so the first task of each slot always runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from mlora.scheduler.memory_need import MemoryNeed, Room, sum_of, within
from mlora.scheduler.policy import Order, Placement

T = TypeVar("T")


class Estimate(Protocol):
    """Predicts how much memory micro-batches need."""

    def activations(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> Sequence[float]:
        """Returns the bytes that a micro-batch needs at each stage besides the states, with an error margin.

        Args:
            lengths: of the sequences of each task that takes part, by name.
            among: names of all tasks that may take part, including those of `lengths`.
        """


@dataclass(frozen=True)
class Admission:
    """Which tasks are admitted.

    Args:
        slots: the slot of each admitted task, by name, in the order of the policy.
        count: slots in use.
        budget: bytes that a micro-batch may need at each stage.
    """

    slots: dict[str, int]
    count: int
    budget: tuple[float, ...]


NOBODY = Admission({}, 1, ())


def admit(
    needs: Sequence[MemoryNeed],
    room: Room,
    slots: int,
    order: Order,
    placement: Placement,
    estimate: Estimate,
    fixed: Mapping[str, int] | None = None,
) -> Admission:
    """Decides which tasks are admitted.

    Args:
        needs: of all tasks that want to run.
        room: the memory that they may use.
        slots: micro-batches of different tasks that fill the pipeline. Fewer are used if the first task would
            not fit otherwise.
        order: decides which task comes first.
        placement: decides which tasks share a slot.
        estimate: predicts memory.
        fixed: slots of tasks that must keep theirs.

    Returns:
        The admission. If no task fits even alone, it holds the first one. Callers leave out tasks that never
        fit, and an estimate that has become too careful must not make the others wait for ever.
    """
    ranked = sorted(needs, key=order.key)
    fixed = fixed or {}
    for count in range(min(slots, max(len(ranked), 1)), 0, -1):
        count = max([count, *(slot + 1 for slot in fixed.values())])
        found = _admit(ranked, room, count, placement, estimate, fixed)
        if found.slots and (room.free is None or ranked[0].name in found.slots or count == 1):
            return found
    if not ranked:
        return NOBODY
    return Admission({ranked[0].name: fixed.get(ranked[0].name, 0)}, 1, room.budget(ranked[0].states, 1))


def _admit(
    ranked: Sequence[MemoryNeed],
    room: Room,
    count: int,
    placement: Placement,
    estimate: Estimate,
    fixed: Mapping[str, int],
) -> Admission:
    if room.free is None:
        places = placement.place(ranked, count, fixed)
        return Admission(places, len(set(places.values())), ())
    found = NOBODY

    def fit(needs: Sequence[MemoryNeed]) -> bool:
        nonlocal found
        budget = room.budget(sum_of([need.states for need in needs], len(room.held)), count)
        if min(budget) <= 0:
            return False
        places = placement.place(needs, count, fixed)
        batches: list[dict[str, Sequence[int]]] = [{} for _ in range(count)]
        for need in needs:
            batches[places[need.name]][need.name] = need.usual
        # the largest first: for them the estimate may take new samples, which the others should follow
        asked = [{need.name: need.largest} for need in needs] + [batch for batch in batches if batch]
        names = list(places)
        if not all(within(estimate.activations(lengths, names), budget) for lengths in asked):
            return False
        found = Admission(places, count, budget)
        return True

    _beside(ranked, fit)
    return found  # the last that fit; asked again, the estimate might have learned something


def next_batch(
    lengths: Mapping[str, Sequence[int]],
    budget: Sequence[float],
    estimate: Estimate,
    among: Sequence[str],
) -> list[str]:
    """Decides which tasks of a slot take part in its next micro-batch.

    Args:
        lengths: of the sequences of each task's next micro-batch, the first task first.
        budget: bytes that the micro-batch may need at each stage.
        estimate: predicts memory.
        among: names of all admitted tasks.

    Returns:
        Names of the tasks that take part, in their order; always the first one.
    """

    def fit(names: Sequence[str]) -> bool:
        batch = {name: lengths[name] for name in names}
        return len(names) == 1 or within(estimate.activations(batch, among), budget)

    return _beside(list(lengths), fit)


def _beside(items: Sequence[T], fit: Callable[[Sequence[T]], bool]) -> list[T]:
    """Takes each item that fits beside those taken before it; `fit` was last true of exactly these.

    Bisects for how many of the first items fit together: if some items fit, fewer of them do, too.
    """
    if not items or fit(items):
        return list(items)
    fewest = bisect_left(range(1, len(items)), True, key=lambda count: not fit(items[:count])) + 1
    taken = list(items[: fewest - 1])
    for item in items[fewest:]:
        if fit([*taken, item]):
            taken.append(item)
    return taken
