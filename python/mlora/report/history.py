"""What the lines of ``metrics.jsonl`` say: curves of each adapter, and memory over time.

A curve takes any number of points and keeps a bounded number of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MOST = 160
"""A curve keeps at most twice as many points."""
_LARGEST = 1e300


@dataclass(slots=True)
class Point:
    """One or several neighbouring points of a curve: how many, their mean place, and their range."""

    count: int
    x: float
    y: float
    low: float
    high: float

    def joined(self, other: Point) -> Point:
        """Returns the points of both."""
        count = self.count + other.count
        share = other.count / count
        x = self.x + (other.x - self.x) * share
        y = self.y + (other.y - self.y) * share
        return Point(count, x, y, min(self.low, other.low), max(self.high, other.high))


class Curve:
    """A curve of which neighbouring points are joined once there are many, each pair alike."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._width = 1  # points that each kept point stands for, but for the last one

    def add(self, x: float, y: float) -> None:
        """Adds a point to the right of all others; values that no chart can hold are left out."""
        if not abs(y) < _LARGEST:  # nor NaN
            return
        new = Point(1, x, y, y, y)
        if self._points and self._points[-1].count < self._width:
            self._points[-1] = self._points[-1].joined(new)
            return
        if len(self._points) == 2 * MOST:
            self._points, self._width = _halved(self._points), 2 * self._width
        self._points.append(new)

    def points(self, most: int = 2 * MOST) -> list[Point]:
        """Returns at most `most` points, the first one to the left."""
        found = self._points
        while len(found) > most:
            found = _halved(found)
        return found


def _halved(points: list[Point]) -> list[Point]:
    pairs = [a.joined(b) for a, b in zip(points[::2], points[1::2], strict=False)]
    return pairs + points[len(points) - len(points) % 2 :]


_NO_CURVE = ("adapter", "step", "tokens", "seconds", "peak_memory_bytes", "skipped", "eval_tokens", "best")


@dataclass
class AdapterHistory:
    """What a run measured of one adapter.

    Args:
        curves: by the key of ``metrics.jsonl``; over its optimizer steps.
        tokens: trained ones.
        seconds: of training.
        skipped: steps that a loss scaler skipped.
    """

    curves: dict[str, Curve] = field(default_factory=lambda: defaultdict(Curve))
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0


@dataclass
class History:
    """What a run measured.

    Args:
        adapters: by name.
        memory: peak memory in bytes over the seconds of training.
        seconds: of training, up to the last line.
        steps: optimizer steps of all adapters.
    """

    adapters: dict[str, AdapterHistory] = field(default_factory=lambda: defaultdict(AdapterHistory))
    memory: Curve = field(default_factory=Curve)
    seconds: float = 0.0
    steps: int = 0


def read_history(records: Iterable[Mapping[str, Any]]) -> History:
    """Reads lines of metrics, one at a time.

    A line says how long ago its adapter's previous step was, not when it was. So time is counted along the
    lines, which are in the order of time: a step ends no earlier than the line before it. The time between
    two parts of a resumed run is not counted.
    """
    history = History()
    ended: dict[str, float] = {}
    for record in records:
        name, step = record["adapter"], record["step"]
        own = history.adapters[name]
        for key, value in record.items():
            if key not in _NO_CURVE and isinstance(value, int | float):
                own.curves[key].add(step, value)
        if "loss" not in record:
            continue
        history.steps += 1
        own.tokens += record.get("tokens", 0)
        own.seconds += record.get("seconds", 0.0)
        own.skipped += bool(record.get("skipped"))
        history.seconds = max(history.seconds, ended.get(name, 0.0) + record.get("seconds", 0.0))
        ended[name] = history.seconds
        if "peak_memory_bytes" in record:
            history.memory.add(history.seconds, record["peak_memory_bytes"])
    return history
