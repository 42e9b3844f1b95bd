"""Files made of a pipeline's trace: for Perfetto, a picture, and times for `mlora simulate`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mlora.errors import RunError
from mlora.files.checkpoint import write_file
from mlora.pipeline.actions import ActionType
from mlora.pipeline.trace import ROLES, Entry, Span
from mlora.simulate.measures import Window, measure
from mlora.simulate.plot_timeline import plot_timeline
from mlora.simulate.stage_times import MeasuredLink, MeasuredStage, StageTimes
from mlora.simulate.timeline import EVALUATION, Event, Timeline, as_events

SPANS = 1 << 17  # per stage; the latest ones are kept
_KINDS = {"forward": ActionType.FORWARD, "backward": ActionType.BACKWARD}
_SHOWN = 60  # micro-batches in the picture, from the begin of the steady window


class TraceFiles:
    """A trace, joined over the stages. Timeline and times are those of the first replica.

    Args:
        stages: the spans of each stage of each replica, from `Trace.by_the_wall`.
        entries: the micro-batches that entered.
        replicas: number of pipelines.
    """

    def __init__(
        self, stages: Sequence[Sequence[Sequence[Any]]], entries: Sequence[Entry], replicas: int = 1
    ) -> None:
        self._count = len(stages) // replicas
        self._stages = [[Span(*span) for span in spans] for spans in stages]
        self._entries = {entry.number: entry for entry in entries}
        self._zero = min((span.begin for spans in self._stages for span in spans), default=0)
        self._computed = [
            {(s.number, _KINDS[s.sort]): s for s in spans if s.role == "compute" and s.sort in _KINDS}
            for spans in self._stages[: self._count]
        ]
        self._whole = [
            entry for entry in entries if entry.train and not entry.replica and self._is_whole(entry)
        ]
        self.streams = list(dict.fromkeys(entry.stream for entry in self._whole))

    def _is_whole(self, entry: Entry) -> bool:
        return all((entry.number, kind) in found for found in self._computed for kind in ActionType)

    def write(self, folder: Path) -> str:
        """Writes `trace.json`, `timeline.png`, `times.json`; returns the bubble and the files in one line.
        If no micro-batch was traced through all stages, only `trace.json` is written. Raises RunError if a
        file cannot be written."""
        written = [_write_json(folder / "trace.json", {"traceEvents": self._perfetto()})]
        timeline = self.timeline()
        bubble = "no micro-batch passed all stages"
        if timeline:
            measures = measure(timeline)
            bubble = measures.bubbles("trace")
            written.append(self._draw(folder / "timeline.png", timeline, measures.window, bubble))
            written.append(_write_json(folder / "times.json", self.times(timeline).model_dump()))
        return f"{bubble}; {', '.join(map(str, written))}"

    def timeline(self) -> Timeline | None:
        """Returns the trained micro-batches that every stage ran, and evaluations; None without training."""
        if not self._whole:
            return None
        streams = {name: index for index, name in enumerate(self.streams)}
        steps = dict.fromkeys(streams, -1)
        events = []
        for entry in self._whole:
            steps[entry.stream] += entry.position == 0 or steps[entry.stream] < 0
            for stage, found in enumerate(self._computed):
                for kind in ActionType:
                    begin, end = (self._seconds(t) for t in found[entry.number, kind][3:])
                    place = (streams[entry.stream], steps[entry.stream], entry.position)
                    events.append(Event(stage, kind, *place, begin, end, entry.rows))
        return Timeline.of([*events, *self._evaluations()])

    def _evaluations(self) -> Iterator[Event]:
        """Returns forwards of micro-batches that are not trained: stages work on them, too."""
        for stage, found in enumerate(self._computed):
            for (number, kind), span in found.items():
                entry = self._entries.get(number)
                if entry and not entry.train and kind is ActionType.FORWARD:
                    begin, end = self._seconds(span.begin), self._seconds(span.end)
                    yield Event(stage, EVALUATION, 0, 0, 0, begin, end, entry.rows)

    def times(self, timeline: Timeline) -> StageTimes:
        """Returns medians over the trained micro-batches.
        A link's latency lasts from the end of computing on one side to the message's arrival on the other."""
        trained = timeline.events[timeline.events["kind"] != EVALUATION]
        rows = max(round(median(trained["rows"])), 1)
        stages = []
        for stage in range(timeline.stages):
            spent: dict[str, list[float]] = {kind: [] for kind in ActionType}
            for event in timeline.of_stage(stage):
                if event.kind != EVALUATION:
                    spent[event.kind].append(event.end - event.begin)
            stages.append(
                MeasuredStage(
                    forward=median(spent[ActionType.FORWARD]), backward=median(spent[ActionType.BACKWARD])
                )
            )
        pairs = range(timeline.stages - 1)
        forward = [self._link(stage, stage + 1, "forward") for stage in pairs]
        backward = [self._link(stage + 1, stage, "backward") for stage in pairs]
        streams = len(self.streams)
        return StageTimes(rows=rows, stages=stages, forward=forward, backward=backward, streams=streams)

    def _link(self, source: int, target: int, sort: str) -> MeasuredLink:
        left = {s.number: s.end for s in self._stages[source] if s.role == "compute" and s.sort == sort}
        come = {s.number: s.end for s in self._stages[target] if s.role == "receive" and s.sort == sort}
        waits = [(come[number] - left[number]) / 1e9 for number in come if number in left]
        return MeasuredLink(latency=max(median(waits), 0.0) if waits else 0.0)

    def _seconds(self, nanoseconds: int) -> float:
        return (nanoseconds - self._zero) / 1e9

    def _draw(self, path: Path, timeline: Timeline, window: Window | None, bubble: str) -> Path:
        events = as_events(timeline.events)
        whole = Window(min(event.begin for event in events), max(event.end for event in events))
        begin = window.begin if window else whole.begin
        first = sorted(e.begin for e in events if e.stage == 0 and e.begin >= begin)
        until = first[min(2 * _SHOWN, len(first) - 1)] if first else whole.end
        shown = [event for event in events if event.end > begin and event.begin <= until] or events
        title = f"{timeline.stages} stages, measured; {bubble}"
        if len(self._stages) > self._count:
            title = f"the first of {len(self._stages) // self._count} pipelines: {title}"
        if len(shown) < len(events):
            seconds = max(event.end for event in shown) - min(event.begin for event in shown)
            title += f"; shown: {seconds:.3g} of {whole.end - whole.begin:.3g} s"
        plot_timeline(path, shown, title, names=self.streams)
        return path

    def _perfetto(self) -> list[Mapping[str, Any]]:
        """Returns events in Chrome's trace format: a process per stage, a thread per role."""
        events: list[Mapping[str, Any]] = []
        for stage, spans in enumerate(self._stages):
            events.append(_name("process_name", stage, 0, f"stage {stage}"))
            events += [_name("thread_name", stage, place, role) for place, role in enumerate(ROLES)]
            for span in spans:
                entry = self._entries.get(span.number)
                label = f"{span.sort} {entry.stream}" if entry else span.sort
                events.append(
                    {
                        "name": label,
                        "ph": "X",
                        "pid": stage,
                        "tid": ROLES.index(span.role),
                        "ts": (span.begin - self._zero) / 1e3,
                        "dur": (span.end - span.begin) / 1e3,
                        "args": {"micro_batch": span.number, "rows": entry.rows if entry else 0},
                    }
                )
        return events


def _name(what: str, stage: int, role: int, name: str) -> Mapping[str, Any]:
    return {"name": what, "ph": "M", "pid": stage, "tid": role, "args": {"name": name}}


def _write_json(path: Path, content: Mapping[str, Any]) -> Path:
    text = json.dumps(content)
    try:
        write_file(path, lambda file: _discard(file.write(text.encode())))
    except OSError as error:
        raise RunError(f"{path}: cannot be saved: {error.strerror}") from error
    return path


def _discard(_: object) -> None:
    return None
