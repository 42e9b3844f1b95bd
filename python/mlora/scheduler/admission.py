"""Who is admitted, and who takes part in a micro-batch: pure functions of plain data.

Both go through the tasks in the order of a policy and take each that fits beside those taken before it. So a
task never runs while one that stands before it, and would fit, waits; and a large task that waits for others
to end does not keep smaller ones from using what is free until then.

Admitted tasks have their states at hand. Admission counts a usual micro-batch of each. A task whose next
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
    """How much memory micro-batches need."""

    def activations(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> Sequence[float]:
        """Return the bytes that a micro-batch needs at each place beyond what states take, error margin
        included.

        Args:
            lengths: of the sequences of each task that takes part.
            among: tasks of which any may take part beside them; those of `lengths` included.
        """


@dataclass(frozen=True)
class Admission:
    """Who is admitted.

    Args:
        slots: of each admitted task, by name, in the order of the policy.
        count: of slots that are in use.
        budget: bytes that a micro-batch may need at each place.
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
    """Decide who is admitted.

    Args:
        needs: of all tasks that want to run.
        room: what they may use.
        slots: micro-batches of different tasks that fill the pipeline; fewer are used where the first task
            would not fit beside others.
        order: who comes first.
        placement: who shares a slot.
        estimate: of memory.
        fixed: slots of tasks that cannot change theirs.

    Returns:
        The admitted. Where none fits even alone, the first one: tasks that never fit are not asked for, and
        an estimate that grew too careful must not keep the others waiting for ever.
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
        # the largest first: they may let the estimate learn more, which the others should follow
        asked = [{need.name: need.largest} for need in needs] + [batch for batch in batches if batch]
        names = list(places)
        if not all(within(estimate.activations(lengths, names), budget) for lengths in asked):
            return False
        found = Admission(places, count, budget)
        return True

    _beside(ranked, fit)
    return found  # as the last that fit; asked again, the estimate may have learned meanwhile


def next_batch(
    lengths: Mapping[str, Sequence[int]],
    budget: Sequence[float],
    estimate: Estimate,
    among: Sequence[str],
) -> list[str]:
    """Decide which tasks of a slot take part in its next micro-batch.

    Args:
        lengths: of the sequences of the next micro-batch of each, the first one first.
        budget: bytes that it may need at each place.
        estimate: of memory.
        among: all admitted tasks.

    Returns:
        Those that do, in their order; the first one always.
    """

    def fit(names: Sequence[str]) -> bool:
        batch = {name: lengths[name] for name in names}
        return len(names) == 1 or within(estimate.activations(batch, among), budget)

    return _beside(list(lengths), fit)


def _beside(items: Sequence[T], fit: Callable[[Sequence[T]], bool]) -> list[T]:
    """Take each item that fits beside those taken before it.

    How many of the first ones fit together is found by bisection: of what fits, less does.

    Args:
        items: in their order.
        fit: says whether some of them fit together; the last of which it does are those that are returned.
    """
    if not items or fit(items):
        return list(items)
    fewest = bisect_left(range(1, len(items)), True, key=lambda count: not fit(items[:count])) + 1
    taken = list(items[: fewest - 1])
    for item in items[fewest:]:
        if fit([*taken, item]):
            taken.append(item)
    return taken
