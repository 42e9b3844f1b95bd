"""`mlora simulate`: turns its options into a workload, and the simulated timeline into its output."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlora.errors import RunError
from mlora.pipeline.actions import FLUSHED
from mlora.simulate.closed_form import is_reached, least_bubble
from mlora.simulate.measures import Measures, measure
from mlora.simulate.simulator import simulate
from mlora.simulate.stage_times import StageTimes, read_times
from mlora.simulate.timeline import Timeline
from mlora.simulate.workload import SimulatedLink, StageTime, Stream, Workload

BARS, MOST_BARS = 60, 60_000
"""Bars in a picture: the least of stage 0, and the most of all stages."""

ADAPTERS = 4
"""Streams of lorapp, unless an option or the file of times gives their number."""

GROUPS_OF_A_STAGE = 2
"""A run spreads its adapters over at most this many groups per stage (`mlora.tasks.groups.group_count`)."""


@dataclass(frozen=True)
class PipelineOptions:
    """Options of the command; see its help. Times are milliseconds, None = not given."""

    schedule: str
    stages: int | None
    adapters: int | None
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
class RunForecast:
    """A simulated run."""

    workload: Workload
    timeline: Timeline
    measures: Measures
    closed_form: float  # a lower bound of an endless run's bubble ratio
    exact: bool  # whether an endless run is known to reach this bound
    origin: str = ""  # says where the number of groups is from, unless it was given

    def as_json(self) -> dict[str, Any]:
        """Returns the content of `--json`, in seconds, bytes and rows."""
        workload = self.workload

        def values(link: SimulatedLink) -> dict[str, Any]:
            return asdict(link) | {"bandwidth": link.bandwidth if math.isfinite(link.bandwidth) else None}

        return {
            "schedule": workload.schedule,
            "stages": [asdict(stage) for stage in workload.stages],
            "links": {
                "forward": [values(link) for link in workload.links(workload.forward)],
                "backward": [values(link) for link in workload.links(workload.backward)],
            },
            "streams": [asdict(stream) for stream in workload.streams],
            "in_flight_limit": workload.in_flight,
            "closed_form": self.closed_form,
            "closed_form_is_exact": self.exact,
            **asdict(self.measures),
        }

    def lines(self) -> list[str]:
        """Returns the lines that the command prints above its table."""
        workload, measures = self.workload, self.measures
        first, stages, streams = workload.streams[0], len(workload.stages), len(workload.streams)
        steps = _counted(first.steps, "step")
        lines = [
            f"{workload.schedule}: {_counted(stages, 'stage')}, {_counted(streams, 'group')}{self.origin} "
            f"of {_counted(first.micro_batches, 'micro-batch', 'es')} a step, {steps}"
        ]
        groups = GROUPS_OF_A_STAGE * stages
        if streams > groups and stages > 1:
            lines.append(
                f"mlora train would put {streams} adapters into {groups} groups that share batches; to "
                f"forecast that, use --adapters {groups} with the times of a group's batch"
            )
        closed = f"{'closed form' if self.exact else 'lower bound'} {self.closed_form:.1%}"
        if measures.bubble_ratio is None or measures.throughput is None:
            lines.append(f"bubble ratio: no steady window in {steps}, {closed}")
            rate = measures.makespan_throughput
        else:
            if round(measures.bubble_ratio, 3) < round(self.closed_form, 3):
                closed += " of an endless run; this run is too short to show it, raise --steps"
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
        """Returns a row of titles and one row per stage."""
        table = [["stage", "forward ms", "backward ms", "most in flight"]]
        for index, time in enumerate(self.workload.stages):
            spent = (time.forward, time.backward)  # `forecast` makes no times that depend on rows
            most = self.measures.in_flight[index]
            table.append([str(index), *(f"{seconds * 1e3:.4g}" for seconds in spent), str(most)])
        return table

    def draw(self, path: Path) -> None:
        """Draws the run's beginning as a PNG, into the second round of the steady window."""
        from mlora.simulate.plot_timeline import plot_timeline

        until = self._until()
        title = f"{self.lines()[0]}, simulated; {self.measures.bubbles('run')}"
        if until is not None:
            title += f"; shown: the first {until / self.measures.makespan:.0%}"
        plot_timeline(path, self.timeline, title, window=self.measures.window, until=until)

    def _until(self) -> float | None:
        """Returns the time at which the picture ends; None = it shows everything."""
        events, window = self.timeline.events, self.measures.window
        until = self.timeline.of_stage(0)[:BARS][-1].end
        if window:
            until = max(until, window.begin + 1.5 * (window.end - window.begin) / self.measures.rounds)
        begins = np.sort(events["begin"])
        until = min(until, float(begins[min(MOST_BARS, len(begins)) - 1]))
        return until if until < begins[-1] else None


MOST_ACTIONS = 10_000_000  # take minutes to simulate


def forecast(options: PipelineOptions) -> RunForecast:
    """Simulates a run with these options; RunError names a wrong option in one line."""
    try:
        times = None if options.times is None else read_times(options.times)
        adapters, origin = _streams(options, times)
        workload = _workload(options, times, adapters)
        timeline = simulate(workload)
    except ValueError as error:
        raise RunError(str(error)) from error
    return RunForecast(
        workload, timeline, measure(timeline), _closed_form(workload), is_reached(workload), origin
    )


def _streams(options: PipelineOptions, times: StageTimes | None) -> tuple[int, str]:
    """Returns the number of lorapp's streams and, unless it was given, where the number is from."""
    if options.adapters is not None or options.times is None or times is None or options.schedule in FLUSHED:
        return options.adapters or ADAPTERS, ""
    if times.streams is None:
        return ADAPTERS, f" (the default, as {options.times.name} gives no number; change it with --adapters)"
    return times.streams, f" (from {options.times.name}; change it with --adapters)"


def _counted(count: int, what: str, plural: str = "s") -> str:
    return f"{count} {what}{plural if count > 1 else ''}"


def _workload(options: PipelineOptions, times: StageTimes | None, adapters: int) -> Workload:
    _check_used(options)
    rows = options.rows or 1
    if times is not None:
        given = ("stages", "forward", "backward", "latency", "bandwidth", "message_bytes", "hidden")
        for name in given:
            if getattr(options, name) is not None:
                option = "bytes" if name == "message_bytes" else name
                raise RunError(f"--{option}: cannot be used with --times, which sets it")
        stages, (forward, backward) = times.stage_times(), times.links()
        if options.rows not in (None, times.rows):
            raise RunError(f"--rows: {options.times} was measured with {times.rows} rows, got {options.rows}")
        rows = times.rows
    else:
        stages = _stages(options)
        link = SimulatedLink(
            _not_negative("latency", options.latency or 0.0) * 1e-3,
            math.inf if options.bandwidth is None else options.bandwidth * 1e9 / 8,
            _message_bytes(options) / rows,
        )
        forward = backward = [link] * (len(stages) - 1)
    streams = adapters if options.schedule == "lorapp" else 1
    actions = streams * options.steps * options.micro_batches * len(stages)
    if actions > MOST_ACTIONS:
        raise RunError(
            f"--steps: {options.steps} steps need {actions} forward passes of a stage; the limit is "
            f"{MOST_ACTIONS}: lower --steps, --adapters, --micro-batches or --stages"
        )
    stream = Stream(options.steps, options.micro_batches, (rows,))
    if options.schedule != "lorapp":
        return Workload(stages, [stream], options.schedule, forward, backward)
    in_flight = options.in_flight or adapters * options.micro_batches
    return Workload(stages, [stream] * adapters, options.schedule, forward, backward, in_flight)


def _check_used(options: PipelineOptions) -> None:
    """Refuses an option that has no effect beside the others, and a bandwidth that is not positive."""
    if options.bandwidth is not None and not options.bandwidth > 0:
        raise RunError(f"--bandwidth: expected a number above 0, got {options.bandwidth}")
    if options.in_flight is not None and options.schedule in FLUSHED:
        raise RunError(f"--in-flight: needs --schedule lorapp; {options.schedule} sets its own limit")
    if options.itemsize is not None and options.hidden is None:
        raise RunError("--itemsize: needs --hidden")
    if options.message_bytes is not None and options.hidden is not None:
        raise RunError("--bytes: cannot be used with --hidden, which sets it")
    if options.bandwidth is None and options.times is None:
        for name, value in (("bytes", options.message_bytes), ("hidden", options.hidden)):
            if value is not None:
                raise RunError(f"--{name}: needs --bandwidth")


def _stages(options: PipelineOptions) -> list[StageTime]:
    forward = _values("forward", "1" if options.forward is None else options.forward)
    backward = _values("backward", "1" if options.backward is None else options.backward)
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
            value = float(part)
        except ValueError as error:
            raise RunError(f"--{name}: expected milliseconds such as 1.5 or 1,2,2,1, got {text!r}") from error
        values.append(_not_negative(name, value))
    return values


def _message_bytes(options: PipelineOptions) -> float:
    if options.message_bytes is not None:
        return _not_negative("bytes", options.message_bytes)
    if options.hidden is None:
        if options.bandwidth is not None:
            raise RunError("--bandwidth: needs --bytes, or --hidden and --rows")
        return 0.0
    return float(options.hidden * (options.rows or 1) * (options.itemsize or 2))


def _not_negative(name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise RunError(f"--{name}: expected a number of at least 0, got {value}")
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
