"""What a contender's turns amount to: tokens/s, bubble, bytes, times of stages, simulated bubble."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from mlora.pipeline.actions import Kind
from mlora.pipeline.measures import Window, measure
from mlora.pipeline.simulate import simulate
from mlora.pipeline.timeline import OPTIMIZER, Event, Timeline
from mlora.pipeline.workload import Link, StageTime, Stream, Workload
from pipeline_turn import Case, Item, Span
from timing import spread

KINDS = {"forward": str(Kind.FORWARD), "backward": str(Kind.BACKWARD), "optimizer": OPTIMIZER}
Ranks = Sequence[Mapping[str, Any]]
"""One turn as each process told of it."""


def row_of(case: Case, turns: Sequence[Ranks], rows: int) -> dict[str, Any]:
    """One contender's numbers: medians over its turns.

    Args:
        case: what it was.
        turns: the timed ones.
        rows: tokens of a micro-batch.
    """
    each = [_numbers(ranks, rows) for ranks in turns]
    row = {key: _median([one[key] for one in each]) for key in each[0]}
    row |= {"spread": spread([one["seconds"] for one in each]), "turns": len(each)}
    row["each"] = {
        key: [one[key] for one in each] for key in ("tokens_per_second", "steady_tokens_per_second")
    }
    if turns[0][0]["spans"]:
        row["times"] = times_of(turns)
    if case.way == "ours":
        row["simulated_bubble"] = simulated_bubble(case, row["times"])
    return row


def _numbers(ranks: Ranks, rows: int) -> dict[str, Any]:
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
        "steady_tokens_per_second": None,
        "of_slowest_stage": None,
    }
    if ranks[0]["spans"]:
        timeline = timeline_of(ranks)
        measures = measure(timeline)
        numbers["bubble"] = measures.bubble_ratio
        if measures.throughput is not None and measures.window is not None:
            numbers["steady_tokens_per_second"] = measures.throughput * rows
            numbers["of_slowest_stage"] = measures.throughput * _slowest(timeline, measures.window)
    return numbers


def _slowest(timeline: Timeline, window: Window) -> float:
    """Seconds that a micro-batch takes on the slowest stage, on average over a window."""
    events = timeline.events
    inside = events[(events["begin"] >= window.begin) & (events["begin"] < window.end)]
    found = []
    for stage in range(timeline.stages):
        own = inside[inside["stage"] == stage]
        found.append(float((own["end"] - own["begin"]).sum()) / (own["kind"] == KINDS["backward"]).sum())
    return max(found)


def timeline_of(ranks: Ranks) -> Timeline:
    """A turn's forwards, backwards and optimizer steps on all stages."""
    items = [Item(*item) for item in ranks[0]["items"]]
    zero = ranks[0]["begin"]
    events = []
    for stage, rank in enumerate(ranks):
        for span in map(Span._make, rank["spans"]):
            if span.role == "compute" and span.sort in KINDS:
                times = (span.begin / 1e9 - zero, span.end / 1e9 - zero)
                events.append(Event(stage, KINDS[span.sort], *items[span.number - 1], *times))
    return Timeline.of(events)


def times_of(turns: Sequence[Ranks]) -> dict[str, Any]:
    """Median seconds of each stage, and of links: from the end of computing to the message's arrival.

    `optimizer` is that of a micro-batch: the step's, divided by how many micro-batches it has.
    """
    stages = range(len(turns[0]))
    pairs = list(pairwise(stages))
    return {
        "stages": [_stage_times(turns, stage) for stage in stages],
        "links_forward": [_latency(turns, a, b, "forward") for a, b in pairs],
        "links_backward": [_latency(turns, b, a, "backward") for a, b in pairs],
    }


def _stage_times(turns: Sequence[Ranks], stage: int) -> dict[str, float]:
    found: dict[str, list[float]] = {sort: [] for sort in KINDS}
    for ranks in turns:
        for span in map(Span._make, ranks[stage]["spans"]):
            if span.role == "compute" and span.sort in KINDS:
                found[span.sort].append((span.end - span.begin) / 1e9)
    middle = {sort: median(values) if values else 0.0 for sort, values in found.items()}
    middle["optimizer"] *= len(found["optimizer"]) / len(found["backward"])
    return middle


def _latency(turns: Sequence[Ranks], source: int, target: int, sort: str) -> float:
    waits = []
    for ranks in turns:
        sent = {s.number: s.end for s in _spans(ranks[source], "compute", sort)}
        waits += [(s.end - sent[s.number]) / 1e9 for s in _spans(ranks[target], "receive", sort)]
    return max(median(waits), 0.0) if waits else 0.0


def _spans(rank: Mapping[str, Any], role: str, sort: str) -> list[Span]:
    return [span for span in map(Span._make, rank["spans"]) if (span.role, span.sort) == (role, sort)]


def simulated_bubble(case: Case, times: Mapping[str, Any]) -> float | None:
    """The bubble of the steady window that the simulator gives for measured times.

    Args:
        case: what ran.
        times: of `times_of`.
    """
    size = case.micro_batches
    stages = [
        StageTime(t["forward"], t["backward"], optimizer=t["optimizer"] * size) for t in times["stages"]
    ]
    forward, backward = ([Link(each) for each in times[f"links_{way}"]] for way in ("forward", "backward"))
    streams = [Stream(max(case.steps, 4), size)] * case.adapters
    in_flight = case.adapters * size if case.schedule == "lorapp" else None
    return measure(
        simulate(Workload(stages, streams, case.schedule, forward, backward, in_flight))
    ).bubble_ratio


def losses_of(ranks: Ranks) -> dict[Item, float]:
    """The loss of each micro-batch; what several processes tell are parts of a sum."""
    found: dict[Item, float] = {}
    for rank in ranks:
        for item, loss in rank["losses"]:
            found[Item(*item)] = found.get(Item(*item), 0.0) + loss
    return found


def worst_difference(turns: Sequence[tuple[Case, Ranks]]) -> float:
    """The largest relative difference of losses between contenders that began with the same adapters.

    Micro-batches are compared where N is the same.

    Raises:
        ValueError: contenders of the same N have no micro-batch in common.
    """
    worst = 0.0
    first: dict[int, dict[Item, float]] = {}
    for case, ranks in turns:
        losses = losses_of(ranks)
        other = first.setdefault(case.micro_batches, losses)
        common = losses.keys() & other.keys()
        if not common:
            raise ValueError(f"{case.name}: told no losses to compare")
        worst = max(worst, *(abs(losses[item] / other[item] - 1) for item in common))
    return worst


def _median(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None
