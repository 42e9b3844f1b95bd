"""Curves that take any number of points and keep a bounded number of them."""

from __future__ import annotations

from dataclasses import dataclass

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
