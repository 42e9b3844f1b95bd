"""The order in which a stage runs what is waiting, for the runtime and the simulator.

Both directions of a pipeline are strict FIFOs. So the choice is only between the oldest waiting forward, the
oldest waiting backward, and waiting.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from .actions import FLUSHED, SCHEDULES, Action, ActionType, Schedule, check_schedule


@dataclass(frozen=True, slots=True)
class RoundPosition:
    """A micro-batch's position in its round."""

    index: int = 0  # from 0
    size: int = 1  # number of micro-batches in the round


ALONE = RoundPosition()
"""The position of a micro-batch that is the only one of its round."""


class Order(Protocol):
    """Chooses what one stage runs next, and remembers its choices."""

    def next_action(self, forward: RoundPosition | None, backward: RoundPosition | None) -> ActionType | None:
        """Chooses between the oldest waiting forward and backward; None = wait, though one may be ready."""


class Alternating:
    """LoRAPP's rule: run what is ready; if both kinds are, the other one than last time.

    With any latency between stages, backward-first locks into a bubble of some 20% if there are as many
    adapters as stages. Alternation stays at the bound. `in_flight` limits the micro-batches between forward
    and backward on this stage; None = any number.
    """

    def __init__(self, in_flight: int | None = None) -> None:
        if in_flight is not None and in_flight < 1:
            raise ValueError(f"in_flight: expected at least 1, got {in_flight}")
        self._most = in_flight
        self._between = 0
        self._last = ActionType.BACKWARD

    def next_action(self, forward: RoundPosition | None, backward: RoundPosition | None) -> ActionType | None:
        full = self._most is not None and self._between >= self._most
        may_forward = forward is not None and not full
        if backward is not None and not (may_forward and self._last is ActionType.BACKWARD):
            chosen = ActionType.BACKWARD
        elif may_forward:
            chosen = ActionType.FORWARD
        else:
            return None
        self._between += 1 if chosen is ActionType.FORWARD else -1
        self._last = chosen
        return chosen


class Listed:
    """Runs a stage's list of actions in order, and waits for each. Each round has a list.
    `schedule` is `gpipe`, `1f1b`, or the lists for rounds of one size."""

    def __init__(self, stage: int, stages: int, schedule: str | Schedule) -> None:
        self._stage, self._stages, self._schedule = stage, stages, schedule
        self._size = None if isinstance(schedule, str) else check_schedule(schedule)
        if not isinstance(schedule, str) and len(schedule) != stages:
            raise ValueError(f"schedule: expected lists for {stages} stages, got {len(schedule)}")
        self._left: deque[Action] = deque()

    def next_action(self, forward: RoundPosition | None, backward: RoundPosition | None) -> ActionType | None:
        """See `Order.next_action`; raises ValueError if a round has another size than the lists are for."""
        if not self._left:
            if forward is None:
                return None
            self._left.extend(self._round(forward.size)[self._stage])
        action = self._left[0]
        head = forward if action.kind is ActionType.FORWARD else backward
        if head is None:
            return None
        assert head.index == action.micro_batch
        return self._left.popleft().kind

    def _round(self, size: int) -> Schedule:
        if isinstance(self._schedule, str):
            return FLUSHED[self._schedule](self._stages, size)
        if size != self._size:
            raise ValueError(f"schedule: expected a round of {self._size} micro-batches, got {size}")
        return self._schedule


def in_flight_of(stage: int, stages: int, in_flight: int) -> int:
    """Returns how many micro-batches may be between forward and backward on stage s.

    With W = `in_flight` micro-batches in a pipeline of D stages this is

        min(W, 1 + k (D - 1 - s)),  k = ceil((W - 1) / (D - 1)).

    For W = D it is 1F1B's `D - s`. With latency between stages and without this limit, the burst of forwards
    at the start makes forwards and backwards block each other. This costs 16 points of bubble at D = W = 8,
    latency 5% of T, T_b = 1.15 T_f. With the limit, the bubble is that of the closed form for any W up to D.
    """
    if in_flight < 1:
        raise ValueError(f"in_flight: expected at least 1, got {in_flight}")
    if stages == 1:
        return in_flight
    each = math.ceil((in_flight - 1) / (stages - 1))
    return min(in_flight, 1 + each * (stages - 1 - stage))


def held_at_once(schedule: str, stages: int, in_flight: int | None = None) -> list[int]:
    """Returns how many micro-batches' activations each stage holds at once at most; None = any number in
    flight."""
    most = sys.maxsize if in_flight is None else in_flight
    if stages == 1:
        return [1]
    if schedule == "lorapp":
        return [in_flight_of(stage, stages, most) for stage in range(stages)]
    if schedule == "1f1b":
        return [min(stages - stage, most) for stage in range(stages)]
    return [most] * stages


def order_of(schedule: str | Schedule, stage: int, stages: int, in_flight: int | None = None) -> Order:
    """Returns a new order for a stage under a schedule; `in_flight` is for `lorapp`, see `in_flight_of`."""
    if isinstance(schedule, str) and schedule not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if stages == 1:
        return Alternating()  # one micro-batch after the other
    if schedule == "lorapp":
        return Alternating(None if in_flight is None else in_flight_of(stage, stages, in_flight))
    return Listed(stage, stages, schedule)
