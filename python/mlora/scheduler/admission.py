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
from typing import TypeVar

from mlora.memory.room import Room, sum_of, within
from mlora.scheduler.policy import MemoryNeed, Order, Placement

T = TypeVar("T")
Bounds = Callable[[Mapping[str, Sequence[int]], Sequence[str]], Sequence[float]]
"""Bounds the bytes that a micro-batch needs at each stage besides the states, given the lengths of the
sequences of each task that takes part, by name, and the names of all tasks that may take part. Tasks with
equal lengths need equally much, beside the same others."""


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
    bounds: Bounds,
    fixed: Mapping[str, int] | None = None,
) -> Admission:
    """Decides which of the tasks that want to run are admitted, and to which slots.

    Fewer than `slots` are used if the first task would not fit otherwise. `fixed` holds the slots of tasks
    that must keep theirs. `bounds` is not asked without a limit. If no task fits even alone, the first one is
    admitted: callers leave out tasks that never fit, and bounds that have become too careful must not make
    the others wait for ever.
    """
    ranked = sorted(needs, key=order)
    fixed = fixed or {}
    for count in range(min(slots, max(len(ranked), 1)), 0, -1):
        count = max([count, *(slot + 1 for slot in fixed.values())])
        found = _admit(ranked, room, count, placement, bounds, fixed)
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
    bounds: Bounds,
    fixed: Mapping[str, int],
) -> Admission:
    if room.free is None:
        places = placement(ranked, count, fixed)
        return Admission(places, len(set(places.values())), ())
    found = NOBODY

    def fit(needs: Sequence[MemoryNeed]) -> bool:
        nonlocal found
        budget = room.budget(sum_of([need.states for need in needs], len(room.held)), count)
        if min(budget) <= 0:
            return False
        places = placement(needs, count, fixed)
        batches: list[dict[str, Sequence[int]]] = [{} for _ in range(count)]
        for need in needs:
            batches[places[need.name]][need.name] = need.usual
        # the largest first: for them new samples may be taken, which the others should follow
        largest = {need.largest: need.name for need in needs}  # many tasks have equal ones
        asked = [{name: lengths} for lengths, name in largest.items()] + [batch for batch in batches if batch]
        names = list(places)
        if not all(within(bounds(lengths, names), budget) for lengths in asked):
            return False
        found = Admission(places, count, budget)
        return True

    _beside(ranked, fit)
    return found  # the last that fit; asked again, the bounds might have learned something


def next_batch(
    lengths: Mapping[str, Sequence[int]], budget: Sequence[float], bounds: Bounds, among: Sequence[str]
) -> list[str]:
    """Decides which tasks of a slot take part in its next micro-batch: always the first one.

    `lengths` are those of each task's next micro-batch, the first task first. `among` names all admitted
    tasks.
    """

    def fit(names: Sequence[str]) -> bool:
        batch = {name: lengths[name] for name in names}
        return len(names) == 1 or within(bounds(batch, among), budget)

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
