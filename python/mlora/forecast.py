"""What `mlora simulate` does: options to a workload, a simulated timeline to what it prints."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlora.errors import RunError
from mlora.pipeline.closed_form import least_bubble
from mlora.pipeline.measures import Measures, measure
from mlora.pipeline.simulate import simulate
from mlora.pipeline.timeline import Timeline, as_events
from mlora.pipeline.workload import Link, StageTime, Stream, Workload
from mlora.stage_times import read_times

BARS, MOST_BARS = 60, 60_000
"""What a picture shows: of stage 0 at least, and of all stages at most."""


@dataclass(frozen=True)
class Options:
    """Options of the command; see its help. Times are milliseconds, None = not given."""

    schedule: str
    stages: int | None
    adapters: int
    micro_batches: int
    steps: int
    forward: str | None
    backward: str | None
    latency: float | None
    bandwidth: float | None
    message_bytes: float | None
    hidden: int | None
    rows: int | None
    itemsize: int | None
    in_flight: int | None
    times: Path | None


@dataclass(frozen=True)
class Forecast:
    """A simulated run.

    Attributes:
        workload: what was simulated.
        timeline: what came of it.
        measures: its numbers.
        closed_form: the bubble ratio of the closed form; of unequal stages, a lower bound.
    """

    workload: Workload
    timeline: Timeline
    measures: Measures
    closed_form: float

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints: seconds, bytes and rows."""
        workload, links = self.workload, {}
        for name in ("forward", "backward"):
            each = [asdict(link) for link in workload.links(getattr(workload, name))]
            links[name] = [
                link | {"bandwidth": link["bandwidth"] if math.isfinite(link["bandwidth"]) else None}
                for link in each
            ]
        return {
            "schedule": workload.schedule,
            "stages": [asdict(stage) for stage in workload.stages],
            "links": links,
            "streams": [asdict(stream) for stream in workload.streams],
            "in_flight_limit": workload.in_flight,
            "closed_form": self.closed_form,
            **asdict(self.measures),
        }

    def lines(self) -> list[str]:
        """What the command prints over its table."""
        workload, measures = self.workload, self.measures
        first, equal = workload.streams[0], len(set(workload.stages)) == 1
        streams = f"{len(workload.streams)} streams" if len(workload.streams) > 1 else "1 stream"
        lines = [
            f"{workload.schedule}: {len(workload.stages)} stages, {streams} of {first.micro_batches} "
            f"micro-batch{'es' if first.micro_batches > 1 else ''} a step, {first.steps} steps"
        ]
        closed = f"{'closed form' if equal else 'lower bound'} {self.closed_form:.1%}"
        if measures.bubble_ratio is None or measures.throughput is None:
            lines.append(f"bubble ratio: no steady window in {first.steps} steps, {closed}")
            rate = measures.makespan_throughput
        else:
            lines.append(f"bubble ratio: {measures.bubble_ratio:.1%} simulated, {closed}")
            rate = measures.throughput
        lines.append(
            f"whole run: {measures.makespan:.4g} s, bubble ratio {measures.makespan_bubble_ratio:.1%}"
        )
        rows = first.rows[0]
        lines.append(
            f"throughput: {rate / rows:.4g} micro-batches/s" + (f", {rate:.4g} rows/s" if rows > 1 else "")
        )
        return lines

    def table(self) -> list[list[str]]:
        """Rows of the stages, the first one with the titles."""
        rows = self.workload.streams[0].rows[0]
        return [
            ["stage", "forward ms", "backward ms", "most in flight"],
            *(
                [
                    str(index),
                    f"{(time.forward + time.forward_row * rows) * 1e3:.4g}",
                    f"{(time.backward + time.backward_row * rows) * 1e3:.4g}",
                    str(self.measures.in_flight[index]),
                ]
                for index, time in enumerate(self.workload.stages)
            ),
        ]

    def draw(self, path: Path) -> None:
        """Write a picture of its begin: into the second round of the steady window.

        Args:
            path: the PNG file.

        Raises:
            RunError: it cannot be written.
        """
        from mlora.plot_timeline import plot_timeline

        events = as_events(self.timeline.events)
        until = self._until()
        title = f"{self.lines()[0]}, simulated; {self.measures.bubbles('run')}"
        if until is not None:
            title += f"; shown: the first {until / self.measures.makespan:.0%}"
        plot_timeline(path, events, title, window=self.measures.window, until=until)

    def _until(self) -> float | None:
        """Where a picture ends; None where it shows everything."""
        events, window = self.timeline.events, self.measures.window
        until = self.timeline.of_stage(0)[:BARS][-1].end
        if window:
            until = max(until, window.begin + 1.5 * (window.end - window.begin) / self.measures.rounds)
        begins = np.sort(events["begin"])
        until = min(until, float(begins[min(MOST_BARS, len(begins)) - 1]))
        return until if until < begins[-1] else None


def forecast(options: Options) -> Forecast:
    """Simulate what the options say.

    Args:
        options: of the command.

    Returns:
        The simulated run.

    Raises:
        RunError: one line that names the option that is wrong.
    """
    try:
        workload = _workload(options)
        timeline = simulate(workload)
    except RunError:
        raise
    except ValueError as error:
        raise RunError(str(error)) from error
    return Forecast(workload, timeline, measure(timeline), _closed_form(workload))


def _workload(options: Options) -> Workload:
    rows = options.rows or 1
    if options.times is not None:
        given = ("stages", "forward", "backward", "latency", "bandwidth", "message_bytes", "hidden")
        for name in given:
            if getattr(options, name) is not None:
                option = "bytes" if name == "message_bytes" else name
                raise RunError(f"--{option}: --times says it; give one of them")
        times = read_times(options.times)
        stages, (forward, backward) = times.stage_times(), times.links()
        if options.rows not in (None, times.rows):
            raise RunError(f"--rows: {options.times} was measured with {times.rows}, got {options.rows}")
        rows = times.rows
    else:
        stages = _stages(options)
        link = Link(
            _at_least("latency", options.latency or 0.0, 0.0) * 1e-3,
            math.inf if options.bandwidth is None else _above("bandwidth", options.bandwidth) * 1e9 / 8,
            _message_bytes(options) / rows,
        )
        forward = backward = [link] * (len(stages) - 1)
    stream = Stream(options.steps, options.micro_batches, (rows,))
    streams = [stream] * (options.adapters if options.schedule == "lorapp" else 1)
    return Workload(stages, streams, options.schedule, forward, backward, options.in_flight)


def _stages(options: Options) -> list[StageTime]:
    forward = _values("forward", options.forward or "1")
    backward = _values("backward", options.backward or "1")
    depth = max(len(forward), len(backward)) if options.stages is None else options.stages
    if options.stages is None and depth == 1:
        depth = 4
    for name, values in (("forward", forward), ("backward", backward)):
        if len(values) not in (1, depth):
            raise RunError(f"--{name}: expected 1 value or {depth} for {depth} stages, got {len(values)}")
    pairs = zip(forward * (depth // len(forward)), backward * (depth // len(backward)), strict=True)
    return [StageTime(first * 1e-3, second * 1e-3) for first, second in pairs]


def _values(name: str, text: str) -> list[float]:
    values = []
    for part in text.split(","):
        try:
            values.append(_at_least(name, float(part), 0.0))
        except ValueError as error:
            raise RunError(f"--{name}: expected milliseconds such as 1.5 or 1,2,2,1, got {text!r}") from error
    return values


def _message_bytes(options: Options) -> float:
    if options.message_bytes is not None:
        if options.hidden is not None:
            raise RunError("--bytes: --hidden says it; give one of them")
        return _at_least("bytes", options.message_bytes, 0.0)
    if options.hidden is None:
        if options.bandwidth is not None:
            raise RunError("--bandwidth: needs the size of a message: --bytes, or --hidden and --rows")
        return 0.0
    return float(options.hidden * (options.rows or 1) * (options.itemsize or 2))


def _at_least(name: str, value: float, least: float) -> float:
    if not (math.isfinite(value) and value >= least):
        raise RunError(f"--{name}: expected a number of at least {least:g}, got {value}")
    return value


def _above(name: str, value: float) -> float:
    if not value > 0:
        raise RunError(f"--{name}: expected a number above 0, got {value}")
    return value


def _closed_form(workload: Workload) -> float:
    rows, stages = workload.streams[0].rows[0], workload.stages
    ways = zip(workload.links(workload.forward), workload.links(workload.backward), strict=True)
    hops = [sum(link.latency + link.seconds(rows) for link in way) for way in ways]
    return least_bubble(
        [stage.seconds(rows) for stage in stages],
        hops,
        len(workload.streams),
        workload.streams[0].micro_batches,
        optimizer=[stage.optimizer for stage in stages],
        in_flight=workload.in_flight,
    )
