"""A window of a pipeline's trace: what each stage computed, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from mlora.errors import RunError, first_line
from mlora.regular_files import open_regular
from mlora.store.disk import os_errors

SHOWN = 24  # micro-batches of the first stage, forward and backward
MOST = 1500  # spans of all stages


@dataclass(frozen=True)
class StageWork:
    """One piece of work of a stage; times are milliseconds since the window's begin."""

    kind: str  # `forward`, `backward`, or something else, such as `update`
    stream: str  # the adapters, or the group of them, that it was for; empty if it was for none
    begin: float
    end: float


@dataclass(frozen=True)
class RunTimeline:
    """A window of a trace, in milliseconds, and what each stage computed in it."""

    stages: Sequence[Sequence[StageWork]]
    length: float
    begin: float  # of the window, since the trace's begin
    whole: float  # length of the whole trace

    def busy(self, stage: int) -> float:
        """Returns the share of the window in which a stage computed."""
        work = self.stages[stage]
        used = sum(min(w.end, self.length) - max(w.begin, 0.0) for w in work)
        return min(used / self.length, 1.0) if self.length else 0.0


def read_timeline(path: Path) -> RunTimeline | None:
    """Reads a window from the middle of a ``trace.json``; None if there is none, or nothing was computed."""
    if not path.exists():
        return None
    with os_errors(f"{path}: cannot be read"), open_regular(path) as file:
        content = file.read()
    try:
        return window_of(from_json(content)["traceEvents"])
    except (ValueError, LookupError, ArithmeticError, TypeError, AttributeError) as error:
        raise RunError(f"{path}: is not a trace: {first_line(error)}") from error


def window_of(events: Sequence[Mapping[str, Any]]) -> RunTimeline | None:
    """Returns the window of events in Chrome's trace format, as `mlora train --trace` writes them."""
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    computed = [e for e in events if e["ph"] == "X" and tracks.get((e["pid"], e["tid"])) == "compute"]
    trained = [e for e in computed if _kind(e) != "other"]
    first = sorted(e["ts"] for e in trained if e["pid"] == 0)
    if not first:
        return None
    start = first[max(0, len(first) // 2 - SHOWN)]
    stop = max(
        e["ts"] + e["dur"] for e in trained if e["ts"] <= first[min(len(first) - 1, len(first) // 2 + SHOWN)]
    )
    stages: list[list[StageWork]] = [[] for _ in range(max(e["pid"] for e in computed) + 1)]
    for e in sorted(computed, key=lambda e: e["ts"]):
        begin, end = e["ts"] - start, e["ts"] + e["dur"] - start
        if end > 0 and e["ts"] < stop and sum(map(len, stages)) < MOST:
            stream = e["name"].partition(" ")[2]
            stages[e["pid"]].append(StageWork(_kind(e), stream, begin / 1e3, min(end, stop - start) / 1e3))
    whole = max(e["ts"] + e["dur"] for e in computed) - min(e["ts"] for e in computed)
    return RunTimeline(stages, (stop - start) / 1e3, start / 1e3, whole / 1e3)


def _kind(event: Mapping[str, Any]) -> str:
    kind = event["name"].partition(" ")[0]
    return kind if kind in ("forward", "backward") else "other"
