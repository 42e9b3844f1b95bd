"""Files made of a pipeline's trace: for Perfetto, and times for `mlora simulate`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mlora.pipeline.actions import ActionType
from mlora.pipeline.trace import BESIDE, ROLES, Entry, Span
from mlora.simulate.measures import measure
from mlora.simulate.stage_times import MeasuredLink, MeasuredStage, StageTimes
from mlora.simulate.timeline import EVALUATION, Event, Timeline
from mlora.store.disk import write_file

SPANS = 1 << 17  # per stage; the latest ones are kept
_KINDS = {"forward": ActionType.FORWARD, "backward": ActionType.BACKWARD}


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
            entry
            for entry in entries
            if entry.train
            and not entry.replica
            and all((entry.number, kind) in found for found in self._computed for kind in ActionType)
        ]
        self.streams = list(dict.fromkeys(entry.stream for entry in self._whole))

    def write(self, folder: Path) -> str:
        """Writes `trace.json` and `times.json`; returns the bubble and the files in one line.
        If no micro-batch was traced through all stages, only `trace.json` is written. Raises RunError if a
        file cannot be written."""
        files = [folder / "trace.json"]
        _write_json(files[0], {"traceEvents": self._perfetto()})
        timeline = self.timeline()
        bubble = "no micro-batch passed all stages"
        if timeline:
            bubble = measure(timeline).bubbles("trace")
            files.append(folder / "times.json")
            _write_json(files[1], self.times(timeline).model_dump())
        return f"{bubble}; {', '.join(map(str, files))}"

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
        events = timeline.events
        rows = max(round(float(np.median(events["rows"][events["kind"] != EVALUATION]))), 1)

        def seconds(stage: int, kind: ActionType) -> float:
            chosen = events[(events["stage"] == stage) & (events["kind"] == kind)]
            return float(np.median(chosen["end"] - chosen["begin"]))

        kinds = _KINDS.items()
        each = [{sort: seconds(stage, kind) for sort, kind in kinds} for stage in range(timeline.stages)]
        stages = [MeasuredStage(**times) for times in each]
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

    def _perfetto(self) -> list[Mapping[str, Any]]:
        """Returns events in Chrome's trace format: a process per stage, a thread for each track."""
        events: list[Mapping[str, Any]] = []
        for stage, spans in enumerate(self._stages):
            events.append(_name("process_name", stage, 0, f"stage {stage}"))
            roles = {span.role for span in spans}
            tracks = [*ROLES, *(role for role in BESIDE if role in roles)]
            events += [_name("thread_name", stage, place, track) for place, track in enumerate(tracks)]
            for span in spans:
                entry = self._entries.get(span.number)
                label = f"{span.sort} {entry.stream}" if entry else span.sort
                events.append(
                    {
                        "name": label,
                        "ph": "X",
                        "pid": stage,
                        "tid": tracks.index(span.role),
                        "ts": (span.begin - self._zero) / 1e3,
                        "dur": (span.end - span.begin) / 1e3,
                        "args": {"micro_batch": span.number, "rows": entry.rows if entry else 0},
                    }
                )
        return events


def _name(what: str, stage: int, role: int, name: str) -> Mapping[str, Any]:
    return {"name": what, "ph": "M", "pid": stage, "tid": role, "args": {"name": name}}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_file(path, json.dumps(content).encode())
