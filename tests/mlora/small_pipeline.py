"""A pipeline in a few lines, step by step in whole seconds: the oracle of the event simulation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlora.pipeline.actions import ActionType
from mlora.pipeline.order import Order, RoundPosition
from mlora.simulate.timeline import Event
from mlora.simulate.workload import Workload


@dataclass
class Waiting:
    """The oldest micro-batch of each kind that waits at a stage, and when it came."""

    stream: int
    step: int
    micro_batch: int
    came: int


@dataclass
class SmallStage:
    """Queues of a stage, and what it runs until when."""

    forward: list[Waiting] = field(default_factory=list)
    backward: list[Waiting] = field(default_factory=list)
    busy: int = 0


class First:
    """Prefers one kind whenever both wait: no rule of ours."""

    def __init__(self, kind: ActionType) -> None:
        self.kind = kind

    def next_action(self, forward: RoundPosition | None, backward: RoundPosition | None) -> ActionType | None:
        if forward and backward:
            return self.kind
        return ActionType.FORWARD if forward else ActionType.BACKWARD


def first_come(forward: Waiting | None, backward: Waiting | None) -> ActionType | None:
    """Whatever came first; of equals the backward."""
    if forward is None or backward is None:
        return None if forward is backward else ActionType.FORWARD if forward else ActionType.BACKWARD
    return ActionType.FORWARD if forward.came < backward.came else ActionType.BACKWARD


def by_order(
    order: Order, size: Sequence[int]
) -> Callable[[Waiting | None, Waiting | None], ActionType | None]:
    """An `Order` as a rule; `size` holds N of each stream."""

    def place(waiting: Waiting | None) -> RoundPosition | None:
        return waiting and RoundPosition(waiting.micro_batch, size[waiting.stream])

    return lambda forward, backward: order.next_action(place(forward), place(backward))


def run_slowly(
    workload: Workload,
    rule_of: Callable[[int], Callable[[Waiting | None, Waiting | None], ActionType | None]],
) -> list[Event]:
    """Run a workload of whole seconds and one row each, second by second.

    Links have latencies only, and stages no optimizer time.
    """
    depth, last = len(workload.stages), len(workload.stages) - 1
    stages, rules = [SmallStage() for _ in range(depth)], [rule_of(s) for s in range(depth)]
    events: list[Event] = []
    due: list[tuple[int, int, ActionType, Waiting]] = []
    steps, left = [0] * len(workload.streams), [0] * len(workload.streams)
    now, open_streams = 0, len(workload.streams)

    def offer(index: int) -> None:
        left[index] = workload.streams[index].micro_batches
        stages[0].forward += [Waiting(index, steps[index], n, now) for n in range(left[index])]

    while open_streams:
        for index, stream in enumerate(workload.streams):
            if stream.start == now:
                offer(index)
        for entry in sorted((e for e in due if e[0] == now), key=lambda e: e[:2]):
            due.remove(entry)
            _, stage, kind, item = entry
            if stage < 0:
                left[item.stream] -= 1
                if not left[item.stream]:
                    steps[item.stream] += 1
                    if steps[item.stream] < workload.streams[item.stream].steps:
                        offer(item.stream)
                    else:
                        open_streams -= 1
                continue
            item.came = now
            (stages[stage].forward if kind is ActionType.FORWARD else stages[stage].backward).append(item)
        for s, stage in enumerate(stages):
            if stage.busy > now:
                continue
            kind = None
            if stage.forward or stage.backward:
                kind = rules[s](*(queue[0] if queue else None for queue in (stage.forward, stage.backward)))
            if kind is None:
                continue
            item = (stage.forward if kind is ActionType.FORWARD else stage.backward).pop(0)
            times = workload.stages[s]
            end = now + int(times.forward if kind is ActionType.FORWARD else times.backward)
            events.append(Event(s, kind, item.stream, item.step, item.micro_batch, now, end))
            if s == last and kind is ActionType.FORWARD:
                rules[s](None, item)
                kind, begin, end = ActionType.BACKWARD, end, end + int(times.backward)
                events.append(Event(s, kind, item.stream, item.step, item.micro_batch, begin, end))
            stage.busy = end
            onward = s + 1 if kind is ActionType.FORWARD else s - 1
            links = workload.links(workload.forward if kind is ActionType.FORWARD else workload.backward)
            delay = int(links[min(s, onward)].latency) if onward >= 0 else 0
            due.append((end + delay, onward, kind, item))
        now += 1
    return events
