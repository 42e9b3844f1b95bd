"""A discrete-event simulation of a pipeline. Its stages decide by the same `Order`s as in the runtime.

Both directions are FIFOs and all stages take micro-batches in one order. So a queue is two counts: how many
micro-batches have come, and how many were begun. Times are whole picoseconds, so that simultaneous events
have equal times.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..pipeline.actions import ActionType
from ..pipeline.order import Order, RoundPosition, order_of
from .timeline import OPTIMIZER, Timeline, stack
from .workload import SimulatedLink, Workload

TICKS = 10**12
_FINISH, _FORWARD, _BACKWARD, _JOIN = range(4)


MeasuredTimes: TypeAlias = Callable[[int, ActionType, int, int, int], float]
"""Seconds by stage, kind, stream, step and micro-batch."""


def simulate(
    workload: Workload,
    orders: Callable[[int, int], Order] | None = None,
    measured: MeasuredTimes | None = None,
) -> Timeline:
    """Simulates a workload, and returns every action of every micro-batch.

    A stream's micro-batches are offered to stage 0 together: when the stream joins, and when all backwards of
    its step have ended there. Streams queue in the order in which they become free. The last stage runs
    forward and backward as one unit. Sends never block a stage.

    Args:
        orders: `(stage, D) -> Order`, instead of those of the workload's schedule.
        measured: the times of each forward and backward, instead of those of the workload's stages. This
            replays a run with the differences between its micro-batches.

    Raises:
        ValueError: the schedule does not fit the streams, a stage waits for ever, or a run takes more than
            2**63 picoseconds.
    """
    try:
        return _Simulation(workload, orders, measured).run()
    except OverflowError as error:
        raise ValueError("times or rows: too large; a simulated run may take at most 106 days") from error


def _ticks(seconds: float) -> int:
    return round(seconds * TICKS)


@dataclass(frozen=True, slots=True)
class _Cost:
    """Ticks of a micro-batch, by stage and by link."""

    index: int
    forward: list[int]
    backward: list[int]
    sent: list[int]
    returned: list[int]


class _Channel:
    """The links of one direction; number s is the one between stages s and s + 1."""

    def __init__(self, links: list[SimulatedLink]) -> None:
        self.latencies = [_ticks(link.latency) for link in links]
        self.free = [0] * len(links)

    def send(self, hop: int, now: int, ticks: int) -> int:
        """Queues a message behind the earlier ones, and returns when it arrives."""
        self.free[hop] = max(now, self.free[hop]) + ticks
        return self.free[hop] + self.latencies[hop]


class _Simulation:
    def __init__(
        self,
        workload: Workload,
        orders: Callable[[int, int], Order] | None,
        measured: MeasuredTimes | None,
    ) -> None:
        self.workload, self.measured = workload, measured
        self.stages = len(workload.stages)
        self.last = self.stages - 1
        orders = orders or (lambda s, stages: order_of(workload.schedule, s, stages, workload.in_flight))
        self.orders = [orders(stage, self.stages) for stage in range(self.stages)]
        self.optimizer = [_ticks(stage.optimizer) for stage in workload.stages]
        self.forward = _Channel(workload.links(workload.forward))
        self.backward = _Channel(workload.links(workload.backward))

        self.now = 0
        self.times: list[int] = []
        self.calendar: dict[int, list[int]] = {}
        self.running: list[ActionType | None] = [None] * self.stages
        self.came_forward = [0] * self.stages
        self.came_backward = [0] * self.stages
        self.begun_forward: list[list[int]] = [[] for _ in range(self.stages)]
        self.begun_backward: list[list[int]] = [[] for _ in range(self.stages)]

        self.items: list[tuple[int, int, int, int]] = []  # stream, step, micro-batch, rows
        self.places: list[RoundPosition] = []
        self.costs: list[_Cost] = []
        self.cost_of: dict[object, _Cost] = {}  # by rows; by micro-batch if times were measured
        self.step = [0] * len(workload.streams)
        self.left = [0] * len(workload.streams)

    def run(self) -> Timeline:
        for index, stream in enumerate(self.workload.streams):
            self.at(_ticks(stream.start), _JOIN, index)
        while self.times:
            self.now = heapq.heappop(self.times)
            touched: list[int] = []
            for code in self.calendar.pop(self.now):
                self.happen(code & 3, code >> 2, touched)
            for stage in touched:
                if self.running[stage] is None:
                    self.begin(stage)
        self.check_ended()
        return self.timeline()

    def at(self, time: int, what: int, index: int) -> None:
        """Plans an event of a stage or, for `_JOIN`, of a stream."""
        if time not in self.calendar:
            self.calendar[time] = []
            heapq.heappush(self.times, time)
        self.calendar[time].append(index << 2 | what)

    def happen(self, what: int, index: int, touched: list[int]) -> None:
        """Carries out an event, and adds to `touched` the stages that may have got work."""
        if what == _FINISH:
            self.finish(index, touched)
        elif what == _FORWARD:
            self.came_forward[index] += 1
        elif what == _BACKWARD:
            self.came_backward[index] += 1
        else:
            self.offer(index)
            index = 0
        touched.append(index)

    def offer(self, index: int) -> None:
        """Queues a stream's next step at stage 0."""
        stream = self.workload.streams[index]
        step, size = self.step[index], stream.micro_batches
        for micro_batch in range(size):
            rows = stream.rows_of(step, micro_batch)
            self.items.append((index, step, micro_batch, rows))
            self.places.append(RoundPosition(micro_batch, size))
            self.costs.append(self.cost(index, step, micro_batch, rows))
        self.left[index] = size
        self.came_forward[0] += size

    def cost(self, stream: int, step: int, micro_batch: int, rows: int) -> _Cost:
        stages, workload, measured = self.workload.stages, self.workload, self.measured
        key: object = (stream, step, micro_batch) if measured else rows
        if key in self.cost_of:
            return self.cost_of[key]
        if measured:
            forward, backward = (
                [measured(stage, kind, stream, step, micro_batch) for stage in range(self.stages)]
                for kind in (ActionType.FORWARD, ActionType.BACKWARD)
            )
        else:
            forward = [stage.forward + stage.forward_row * rows for stage in stages]
            backward = [stage.backward + stage.backward_row * rows for stage in stages]
        cost = self.cost_of[key] = _Cost(
            len(self.cost_of),
            [_ticks(seconds) for seconds in forward],
            [_ticks(seconds) for seconds in backward],
            [_ticks(link.seconds(rows)) for link in workload.links(workload.forward)],
            [_ticks(link.seconds(rows)) for link in workload.links(workload.backward)],
        )
        return cost

    def begin(self, stage: int) -> None:
        """Lets an idle stage choose its next action and begin it."""
        forwards, backwards = self.begun_forward[stage], self.begun_backward[stage]
        first, second = len(forwards), len(backwards)
        forward = self.places[first] if first < self.came_forward[stage] else None
        backward = self.places[second] if second < self.came_backward[stage] else None
        if forward is None and backward is None:
            return
        kind = self.orders[stage].next_action(forward, backward)
        if kind is None:
            return
        if kind is ActionType.BACKWARD:
            backwards.append(self.now)
            end = self.now + self.costs[second].backward[stage]
        else:
            begin = self.now + self.optimizer_ticks(stage, first)
            forwards.append(begin)
            end = begin + self.costs[first].forward[stage]
            if stage == self.last:
                kind = self.orders[stage].next_action(None, forward)
                assert kind is ActionType.BACKWARD, "the last stage runs units"
                backwards.append(end)
                end += self.costs[first].backward[stage]
        self.running[stage] = kind
        self.at(end, _FINISH, stage)

    def optimizer_ticks(self, stage: int, item: int) -> int:
        """Returns the ticks of the optimizer step that precedes the next step's first forward, or 0."""
        if not self.optimizer[stage]:
            return 0
        _, step, micro_batch, _ = self.items[item]
        return self.optimizer[stage] if step and not micro_batch else 0

    def finish(self, stage: int, touched: list[int]) -> None:
        """Ends a stage's action: sends its result to the neighbour or, at stage 0, ends a micro-batch."""
        kind, self.running[stage] = self.running[stage], None
        if kind is ActionType.FORWARD:
            item = len(self.begun_forward[stage]) - 1
            arrival = self.forward.send(stage, self.now, self.costs[item].sent[stage])
            self.arrive(arrival, _FORWARD, stage + 1, touched)
        elif stage:
            item = len(self.begun_backward[stage]) - 1
            arrival = self.backward.send(stage - 1, self.now, self.costs[item].returned[stage - 1])
            self.arrive(arrival, _BACKWARD, stage - 1, touched)
        else:
            self.end(self.items[len(self.begun_backward[0]) - 1][0])

    def arrive(self, time: int, what: int, stage: int, touched: list[int]) -> None:
        if time == self.now:
            self.happen(what, stage, touched)
        else:
            self.at(time, what, stage)

    def end(self, index: int) -> None:
        """Ends a micro-batch of a stream, and offers the next step after the last one of a step."""
        self.left[index] -= 1
        if not self.left[index]:
            self.step[index] += 1
            if self.step[index] < self.workload.streams[index].steps:
                self.offer(index)

    def check_ended(self) -> None:
        for index, stream in enumerate(self.workload.streams):
            if self.step[index] < stream.steps:
                raise ValueError(
                    f"schedule: deadlock: stream {index} never finishes its step {self.step[index]}"
                )

    def timeline(self) -> Timeline:
        stream, step, micro_batch, rows = np.array(self.items).T
        which = np.array([cost.index for cost in self.costs])
        common = {"stream": stream, "step": step, "micro_batch": micro_batch, "rows": rows}
        common |= {"stage": np.arange(self.stages)[:, None]}

        def part(kind: str, begun: list[list[int]], ticks: str) -> dict[str, np.ndarray]:
            begin = np.array(begun, dtype=np.int64)
            end = begin + np.array([getattr(cost, ticks) for cost in self.cost_of.values()])[which].T
            return common | {"kind": kind, "begin": begin / TICKS, "end": end / TICKS}

        forward = part(ActionType.FORWARD, self.begun_forward, "forward")
        backward = part(ActionType.BACKWARD, self.begun_backward, "backward")
        return Timeline(self.stages, stack([forward, backward, self.optimizer_part(forward)]))

    def optimizer_part(self, forward: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the optimizer steps, each just before the forward that waited for it."""
        first = (forward["step"] > 0) & (forward["micro_batch"] == 0)
        spent = np.array(self.optimizer)[:, None] / TICKS
        busy = spent[:, 0] > 0
        end = forward["begin"][busy][:, first]
        chosen = {name: forward[name][first] for name in ("stream", "step", "micro_batch", "rows")}
        chosen["step"] = chosen["step"] - 1
        stage = forward["stage"][busy]
        return chosen | {"kind": OPTIMIZER, "stage": stage, "begin": end - spent[busy], "end": end}
