"""What a contender's turns amount to: tokens/s, bubble, bytes, times of stages, simulated bubble."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from mlora.pipeline.actions import ActionType
from mlora.pipeline.trace import Entry, Span
from mlora.simulate.measures import busy_shares, measure
from mlora.simulate.simulator import simulate
from mlora.simulate.timeline import OPTIMIZER, Event, Timeline, as_events
from mlora.simulate.trace_file import TraceFiles
from mlora.simulate.workload import SimulatedLink, StageTime, Stream, Workload
from shared.timing import spread

from pipeline.places import Case, Item

GIGABIT = 125e6  # bytes per second, the rate of the links between network namespaces
_KEPT = (
    "tokens_per_second",
    "steady_tokens_per_second",
    "of_slowest_stage",
    "bubble",
    "simulated_bubble",
)
"""What is kept of each turn."""
Ranks = Sequence[Mapping[str, Any]]
"""One turn as each process told of it."""


def row_of(case: Case, turns: Sequence[Ranks], rows: int) -> dict[str, Any]:
    """One contender's numbers: medians over its turns."""
    each = [_numbers(case, ranks, rows) for ranks in turns]
    row = {key: _median([one[key] for one in each]) for key in each[0]}
    row |= {"spread": spread([one["seconds"] for one in each]), "turns": len(each)}
    row["each"] = {key: [one[key] for one in each] for key in _KEPT}
    if turns[0][0]["spans"]:
        row["times"] = times_of(turns)
    return row


def _numbers(case: Case, ranks: Ranks, rows: int) -> dict[str, Any]:
    seconds = max(rank["seconds"] for rank in ranks)
    busy = sum(rank["processor_seconds"] for rank in ranks)
    items = ranks[0]["items"]
    others = max(0.0, max(rank["machine_seconds"] for rank in ranks) - busy)
    ended = [end - ranks[0]["begin"] for end in ranks[0]["ended"]]
    numbers = {
        "seconds": seconds,
        "tokens_per_second": len(items) * rows / seconds,
        "processors": busy / seconds,
        "other_processes_share": others / (seconds * (os.cpu_count() or 1)),
        "mean_completion_seconds": sum(ended) / len(ended),
        "bytes_per_micro_batch": sum(rank["sent"] for rank in ranks) / len(items),
        "wire_bytes_per_micro_batch": sum(rank["wire"] for rank in ranks) / len(items),
        "delay": ranks[0]["delay"],
        "bubble": None,
        "simulated_bubble": None,
        "steady_tokens_per_second": None,
        "of_slowest_stage": None,
    }
    if ranks[0]["spans"]:
        timeline = timeline_of(ranks)
        measures = measure(timeline)
        numbers["bubble"] = measures.bubble_ratio
        if measures.throughput is not None and measures.window is not None:
            numbers["steady_tokens_per_second"] = measures.throughput * rows
            numbers["of_slowest_stage"] = max(busy_shares(timeline, measures.window))
        if case.way == "ours":
            on_wire = numbers["wire_bytes_per_micro_batch"] / (2 * max(len(ranks) - 1, 1)) / GIGABIT
            numbers["simulated_bubble"] = simulated_bubble(case, timeline, _times_of_turn(ranks), on_wire)
    return numbers


def timeline_of(ranks: Ranks) -> Timeline:
    """A turn's forwards, backwards and optimizer steps on all stages."""
    items, stages = ranks[0]["items"], _spans(ranks)
    traced = _traced(items, stages).timeline()
    assert traced is not None, "every stage has run every micro-batch"
    steps = [
        Event(stage, OPTIMIZER, *items[span.number - 1], span.begin / 1e9, span.end / 1e9)
        for stage, spans in enumerate(stages)
        for span in spans
        if span.sort == "optimizer"
    ]
    return Timeline.of([*as_events(traced.events), *steps])


def _spans(ranks: Ranks) -> list[list[Span]]:
    """Those of each stage, since the begin of the first one."""
    stages = [[Span(*span) for span in rank["spans"]] for rank in ranks]
    zero = min(span.begin for spans in stages for span in spans)
    return [[span._replace(begin=span.begin - zero, end=span.end - zero) for span in own] for own in stages]


def _traced(items: Sequence[Sequence[int]], stages: Sequence[Sequence[Span]]) -> TraceFiles:
    entries = [
        Entry(number, str(adapter), micro_batch, rows=1, train=True)
        for number, (adapter, _step, micro_batch) in enumerate(items, 1)
    ]
    return TraceFiles(stages, entries)


def times_of(turns: Sequence[Ranks]) -> dict[str, Any]:
    """Seconds of each stage, and of links: from the end of computing to the message's arrival.

    Medians over turns of medians. `optimizer` is that of a micro-batch: the step's, divided by how many
    micro-batches it has.
    """
    each = [_times_of_turn(ranks) for ranks in turns]
    stages = [
        {sort: median(times["stages"][stage][sort] for times in each) for sort in times}
        for stage, times in enumerate(each[0]["stages"])
    ]
    links = {
        way: [median(link) for link in zip(*(times[way] for times in each), strict=True)]
        for way in ("links_forward", "links_backward")
    }
    return {"stages": stages, **links}


def _times_of_turn(ranks: Ranks) -> dict[str, Any]:
    items, stages = ranks[0]["items"], _spans(ranks)
    traced = _traced(items, stages)
    timeline = traced.timeline()
    assert timeline is not None, "every stage has run every micro-batch"
    times = traced.times(timeline)
    spent = [[(s.end - s.begin) / 1e9 for s in own if s.sort == "optimizer"] for own in stages]
    optimizer = [median(own) * len(own) / len(items) if own else 0.0 for own in spent]
    return {
        "stages": [
            {"forward": stage.forward, "backward": stage.backward, "optimizer": seconds}
            for stage, seconds in zip(times.stages, optimizer, strict=True)
        ],
        "links_forward": [link.latency for link in times.forward],
        "links_backward": [link.latency for link in times.backward],
    }


def simulated_bubble(
    case: Case, timeline: Timeline, times: Mapping[str, Any], on_wire: float
) -> float | None:
    """The bubble of the steady window that the simulator gives for the times of a turn.

    Each forward and backward takes as long as it took. A link is occupied for as long as the bytes that were
    on the wire need at its rate, and the rest of what was measured is latency; without a rate all of it is.

    Args:
        case: what ran.
        timeline: when what ran.
        times: of `times_of`; of them count the links and the optimizer.
        on_wire: seconds that a micro-batch occupies a link.
    """
    size = case.micro_batches
    stages = [
        StageTime(t["forward"], t["backward"], optimizer=t["optimizer"] * size) for t in times["stages"]
    ]
    spent = {
        (event.stage, event.kind, event.stream, event.step, event.micro_batch): event.end - event.begin
        for event in as_events(timeline.events)
    }

    def measured(stage: int, kind: ActionType, stream: int, step: int, micro_batch: int) -> float:
        return spent[stage, kind, stream, step % case.steps, micro_batch]

    forward, backward = (
        [SimulatedLink(max(seconds - on_wire, 0.0), overhead=on_wire) for seconds in times[f"links_{way}"]]
        for way in ("forward", "backward")
    )
    # until the first adapter ends, those that wait for a place do nothing
    adapters = case.at_once or case.adapters
    streams = [Stream(max(case.steps, 4), size)] * adapters
    in_flight = adapters * size if case.schedule == "lorapp" else None
    workload = Workload(stages, streams, case.schedule, forward, backward, in_flight)
    return measure(simulate(workload, measured=measured)).bubble_ratio


def losses_of(ranks: Ranks) -> dict[Item, float]:
    """The loss of each micro-batch; what several processes tell are parts of a sum."""
    found: dict[Item, float] = {}
    for rank in ranks:
        for item, loss in rank["losses"]:
            found[Item(*item)] = found.get(Item(*item), 0.0) + loss
    return found


def worst_difference(turns: Sequence[tuple[Case, Ranks]]) -> float:
    """The largest relative difference of losses between contenders that began with the same adapters.

    Losses of all steps count; those behind an update show whether the gradients were the same ones, but for a
    constant factor, which AdamW does not see. Micro-batches are compared where N is the same.

    Raises:
        ValueError: contenders of the same N have no micro-batch behind an update in common.
    """
    worst = 0.0
    known: dict[int, dict[Item, float]] = {}
    for case, ranks in turns:
        losses = losses_of(ranks)
        others = known.setdefault(case.micro_batches, losses)
        common = losses.keys() & others.keys()
        if not any(item.step for item in common):
            raise ValueError(f"{case.name}: told no losses behind an update to compare")
        found = [abs(losses[item] / others[item] - 1) for item in common]
        worst = max(worst, *(each if math.isfinite(each) else math.inf for each in found))
        known[case.micro_batches] = losses | others
    return worst


def _median(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None
