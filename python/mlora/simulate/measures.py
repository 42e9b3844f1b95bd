"""Measures of a timeline: bubble ratio, throughput, micro-batches in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..pipeline.actions import ActionType
from .timeline import Timeline


class Window(NamedTuple):
    """A stretch of time, in seconds."""

    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Measures:
    """The measures of a timeline."""

    makespan: float  # seconds from the first begin to the last end
    makespan_bubble_ratio: float  # idle / (stages * makespan)
    makespan_throughput: float  # rows per second over the makespan
    window: Window | None  # the steady window, None if the run is too short for one
    rounds: int  # number of rounds in the window
    bubble_ratio: float | None  # idle / (stages * time) over the window
    throughput: float | None  # rows per second over the window
    # for each stage, the most micro-batches between begin of forward and end of backward
    in_flight: list[int]
    rows_in_flight: list[int]  # for each stage, the most rows of these micro-batches

    def bubbles(self, whole: str) -> str:
        """Returns the bubble ratios in words; `whole` names what the makespan covers, `run` or `trace`."""
        steady = "" if self.bubble_ratio is None else f"{self.bubble_ratio:.1%} in the steady window, "
        return f"bubble {steady}{self.makespan_bubble_ratio:.1%} of the whole {whole}"


def measure(timeline: Timeline) -> Measures:
    """Measures a timeline, simulated or of a trace."""
    events = timeline.events
    whole = Window(float(events["begin"].min()), float(events["end"].max()))
    window, rounds = steady_window(timeline)
    in_flight = [_most_in_flight(events[events["stage"] == stage]) for stage in range(timeline.stages)]
    return Measures(
        makespan=whole.end - whole.begin,
        makespan_bubble_ratio=bubble_ratio(timeline, whole),
        makespan_throughput=throughput(timeline, whole),
        window=window,
        rounds=rounds,
        bubble_ratio=bubble_ratio(timeline, window) if window else None,
        throughput=throughput(timeline, window) if window else None,
        in_flight=[most for most, _ in in_flight],
        rows_in_flight=[rows for _, rows in in_flight],
    )


def steady_window(timeline: Timeline) -> tuple[Window | None, int]:
    """Returns the window of whole rounds after every stage's first backward and before any stream ends.

    A round is a step of the stream that ends first: from the end of its last backward on stage 0 to the end
    of the next step's. Also returns the number of rounds; without a whole round, None and 0. The timeline
    must cover a whole run.
    """
    backwards = timeline.events[timeline.events["kind"] == ActionType.BACKWARD]
    ends = np.full(timeline.stages, np.inf)
    np.minimum.at(ends, backwards["stage"], backwards["end"])
    at_first = backwards[backwards["stage"] == 0]
    last = np.zeros(int(at_first["stream"].max()) + 1)
    np.maximum.at(last, at_first["stream"], at_first["end"])
    streams = np.unique(at_first["stream"])
    own = at_first[at_first["stream"] == streams[np.argmin(last[streams])]]
    rounds = np.zeros(int(own["step"].max()) + 1)
    np.maximum.at(rounds, own["step"], own["end"])
    rounds = rounds[rounds >= ends.max()]
    if len(rounds) < 2:
        return None, 0
    return Window(float(rounds[0]), float(rounds[-1])), len(rounds) - 1


def bubble_ratio(timeline: Timeline, window: Window) -> float:
    """Returns idle / (stages * time) within a window."""
    return max(0.0, 1.0 - sum(busy_shares(timeline, window)) / timeline.stages)  # sums of times are rounded


def busy_shares(timeline: Timeline, window: Window) -> list[float]:
    """Returns busy / time of each stage within a window.
    The largest share is the throughput relative to that of the slowest stage if it never waited."""
    events, whole = timeline.events, window.end - window.begin
    if not whole:
        return [1.0] * timeline.stages
    busy = np.minimum(events["end"], window.end) - np.maximum(events["begin"], window.begin)
    shares = np.bincount(events["stage"], busy.clip(min=0), timeline.stages) / whole
    return [float(share) for share in shares]


def throughput(timeline: Timeline, window: Window) -> float:
    """Returns rows per second whose backward on stage 0 ends in a window, its begin excluded."""
    events = timeline.events
    chosen = (events["stage"] == 0) & (events["kind"] == ActionType.BACKWARD)
    chosen &= (events["end"] > window.begin) & (events["end"] <= window.end)
    whole = window.end - window.begin
    return float(events["rows"][chosen].sum()) / whole if whole else float("inf")


def _most_in_flight(events: np.ndarray) -> tuple[int, int]:
    """Returns the most micro-batches, and the most rows, between forward and backward on one stage."""
    forwards = events[events["kind"] == ActionType.FORWARD]
    backwards = events[events["kind"] == ActionType.BACKWARD]
    ends = np.sort(backwards["end"])
    left = np.concatenate([[0], np.cumsum(backwards["rows"][np.argsort(backwards["end"])])])
    ended = np.searchsorted(ends, forwards["begin"], side="right")
    most = np.arange(1, len(forwards) + 1) - ended
    rows = np.cumsum(forwards["rows"]) - left[ended]
    return int(most.max(initial=0)), int(rows.max(initial=0))
