"""What a stage does next, given what is waiting: shared by the runtime and the simulator.

Both directions of a pipeline are strict FIFOs, so the choice is only between the oldest waiting forward, the
oldest waiting backward, and waiting.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from .actions import Action, ActionType, Schedule, check_schedule
from .schedules import FLUSHED, SCHEDULES


@dataclass(frozen=True, slots=True)
class RoundPosition:
    """Where a micro-batch stands in its round.

    Attributes:
        index: from 0.
        size: micro-batches of the round.
    """

    index: int = 0
    size: int = 1


ALONE = RoundPosition()
"""The only micro-batch of its round."""


class Order(Protocol):
    """One stage's choices; it remembers what it chose."""

    def next_action(self, forward: RoundPosition | None, backward: RoundPosition | None) -> ActionType | None:
        """Choose what runs now.

        Args:
            forward: the oldest waiting forward, None where there is none.
            backward: the oldest waiting backward.

        Returns:
            Its kind, or None to wait although something may be ready.
        """


class Alternating:
    """LoRAPP's rule: whatever is ready; when both are, the other than the last.

    With any latency between stages, pure backward-first locks into a bubble of some 20% where there are as
    many adapters as stages; alternation stays at the bound.

    Args:
        in_flight: the most micro-batches between their forward and backward on this stage; None = any number.
    """

    def __init__(self, in_flight: int | None = None) -> None:
        if in_flight is not None and in_flight < 1:
            raise ValueError(f"in_flight: expected at least 1, got {in_flight}")
        self._most = in_flight
        self._between = 0
        self._last = ActionType.BACKWARD

    def next_action(self, forward: RoundPosition | None, backward: RoundPosition | None) -> ActionType | None:
        """See `Order.next_action`."""
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
    """A stage's list of actions, one after the other, waiting for each; a list for each round.

    Args:
        stage: whose list.
        stages: D.
        schedule: `gpipe` or `1f1b`, or the lists of a round of one fixed size.

    Raises:
        ValueError: if there is no such schedule, or the lists are not those of D stages.
    """

    def __init__(self, stage: int, stages: int, schedule: str | Schedule) -> None:
        self._stage, self._stages, self._schedule = stage, stages, schedule
        self._size = None if isinstance(schedule, str) else check_schedule(schedule)
        if not isinstance(schedule, str) and len(schedule) != stages:
            raise ValueError(f"schedule: expected lists for {stages} stages, got {len(schedule)}")
        self._left: deque[Action] = deque()

    def next_action(self, forward: RoundPosition | None, backward: RoundPosition | None) -> ActionType | None:
        """See `Order.next_action`.

        Raises:
            ValueError: if a round has another size than the lists are for.
        """
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
            raise ValueError(f"schedule: is for rounds of {self._size} micro-batches, got {size}")
        return self._schedule


def in_flight_of(stage: int, stages: int, in_flight: int) -> int:
    """How many of W micro-batches in a pipeline of D stages may be between forward and backward on stage s.

    `min(W, 1 + k (D - 1 - s))` with `k = ceil((W - 1) / (D - 1))`: 1F1B's `D - s` where W = D. With latency
    between stages and no such limit, the burst of forwards at the start locks forwards and backwards into
    each other's way: 16 points of bubble at D = W = 8, latency 5% of T, T_b = 1.15 T_f. With it the bubble is
    the closed form's for any W up to D.

    Args:
        stage: s.
        stages: D.
        in_flight: W.

    Returns:
        At least 1; W on the first stage.

    Raises:
        ValueError: if W is below 1.
    """
    if in_flight < 1:
        raise ValueError(f"in_flight: expected at least 1, got {in_flight}")
    if stages == 1:
        return in_flight
    each = math.ceil((in_flight - 1) / (stages - 1))
    return min(in_flight, 1 + each * (stages - 1 - stage))


def order_of(schedule: str | Schedule, stage: int, stages: int, in_flight: int | None = None) -> Order:
    """The order of a stage under a schedule.

    Args:
        schedule: `lorapp`, `1f1b` or `gpipe`, or lists of actions.
        stage: whose order.
        stages: D.
        in_flight: for `lorapp`, the most micro-batches in the pipeline at once; None = any number. See
            `in_flight_of`.

    Returns:
        A new order.

    Raises:
        ValueError: if there is no such schedule, or the lists do not fit.
    """
    if isinstance(schedule, str) and schedule not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if stages == 1:
        return Alternating()  # a micro-batch after the other
    if schedule == "lorapp":
        return Alternating(None if in_flight is None else in_flight_of(stage, stages, in_flight))
    return Listed(stage, stages, schedule)
