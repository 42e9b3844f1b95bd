"""From curves to what a template draws: paths in a square of 1000 units, ticks and labels in per cent.

The page stretches the square; strokes and text keep their sizes. So a chart has any width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mlora.report.history import Point

UNITS = 1000
SMALL = 120  # pixels: a chart of this height or less has few ticks and no notes on its points
LETTERS = 15.0  # pixels that a label needs for itself
LOG_FROM = 40.0  # a chart whose largest value is so many times its smallest has a logarithmic axis
Form = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """A curve of a chart; `style` is the name of its class in the page's styles."""

    label: str
    style: str
    points: Sequence[Point]
    dots: bool = False


@dataclass(frozen=True)
class Mark:
    """A text at a place; per cent from the left or the top."""

    place: float
    text: str
    style: str = ""
    across: float = 0.0  # of a label that stands beside the end of its curve


@dataclass(frozen=True)
class Chart:
    """What the template draws."""

    title: str
    description: str
    note: str
    keys: Sequence[tuple[str, str]]
    shapes: Sequence[tuple[str, str]]  # class and path
    rows: Sequence[Mark]  # of the vertical axis
    columns: Sequence[Mark]  # of the horizontal axis
    ends: Sequence[Mark]  # the last values, at the right
    rules: Sequence[Mark]
    height: int = 96


@dataclass(frozen=True)
class Axis:
    """From values to per cent of the axis' length."""

    low: float
    high: float
    ticks: Sequence[float] = field(default_factory=list)
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Returns where a value lies: 0 at the low end, 1 at the high end."""
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = (math.log10(max(each, low / 1e3)) for each in (value, low, high))
        return (value - low) / (high - low)


def chart(
    title: str,
    series: Sequence[Series],
    form: Form,
    *,
    across: str = "step",
    across_form: Form = lambda value: f"{value:,.0f}",
    span: tuple[float, float] | None = None,
    rules: Mapping[str, float] | None = None,
    zero: bool = False,
    logarithmic: bool = False,
    unit: float = 1.0,
    height: int = 96,
) -> Chart | None:
    """Returns a chart of curves that share both axes; None if no curve has a point.

    Args:
        form: how values are written.
        across: what the horizontal axis counts.
        span: the ends of the horizontal axis; by default 0 and the last point.
        zero: let the vertical axis begin at 0.
        logarithmic: let the vertical axis be so, if all values are above 0.
        unit: of which ticks are round multiples.
        rules: horizontal lines by their labels, such as a limit.
        height: in pixels, at least.
    """
    series = [each for each in series if each.points]
    if not series:
        return None
    values = [point.y for each in series for point in each.points] + list((rules or {}).values())
    up = value_axis(
        min(values),
        max(values),
        zero=zero,
        logarithmic=logarithmic,
        unit=unit,
        parts=3 if height > SMALL else 2,
    )
    first, last = span or (0.0, max(p.x for each in series for p in each.points))
    along = Axis(first, last if last > first else first + 1)
    shapes = [shape for each in series for shape in _shapes(each, along, up)]
    ends = [_end(each, along, up, form) for each in series]
    return Chart(
        title=title,
        description=f"{title}: {'; '.join(_told(each, form) for each in series)}",
        note=", ".join(_notes(series, up, joins=height > SMALL)),
        keys=[(each.label, each.style) for each in series],
        shapes=shapes,
        rows=[Mark(100 - 100 * up.share(tick), form(tick)) for tick in up.ticks],
        columns=_columns(first, last, across, across_form),
        ends=_apart(ends, height),
        rules=[Mark(100 - 100 * up.share(y), label) for label, y in (rules or {}).items()],
        height=height,
    )


def spreads(values: Sequence[float]) -> bool:
    """Whether values differ by so much that a logarithmic axis shows them better."""
    return bool(values) and min(values) > 0 and max(values) > LOG_FROM * min(values)


def value_axis(
    low: float,
    high: float,
    *,
    zero: bool = False,
    logarithmic: bool = False,
    unit: float = 1.0,
    parts: int = 3,
) -> Axis:
    """Returns an axis for values between `low` and `high`, with a few round ticks.

    One that is not logarithmic begins at 0 if the values come near it. Ticks cut it into about `parts`.
    """
    if logarithmic and low > 0:
        low, high = low / 1.2, high * 1.2
        return Axis(low, high, _log_ticks(low, high, 2 * parts), logarithmic=True)
    if zero or 0 < low < 0.6 * high:
        low = min(low, 0.0)
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        around = abs(high) / 2 or 0.5
        low, high = low - around, high + around
    step = unit * _round_step((high - low) / unit / parts)
    ticks = [
        step * place for place in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]
    margin = 0.04 * (high - low)
    return Axis(low if low == 0 else low - margin, high + margin, ticks)


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """Returns 1, 2 and 5 times powers of ten, powers of ten, or every second one and so on."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = [powers[::step] for step in range(1, len(powers) + 1)]
    choices = [[factor * 10.0**power for power in powers for factor in (1, 2, 5)]]
    choices += [[10.0**power for power in some] for some in every]
    inside = [[tick for tick in ticks if low <= tick <= high] for ticks in choices]
    return next((ticks for ticks in inside if len(ticks) <= most), [])


def _round_step(wanted: float) -> float:
    """Returns 1, 2 or 5 times a power of ten, near what is wanted."""
    power = 10.0 ** math.floor(math.log10(wanted))
    return min((power * factor for factor in (1, 2, 5, 10)), key=lambda step: abs(step - wanted))


def _shapes(series: Series, along: Axis, up: Axis) -> list[tuple[str, str]]:
    places = [
        (_unit(along.share(p.x)), *(_unit(1 - up.share(y)) for y in (p.y, p.low, p.high)))
        for p in series.points
    ]
    found = []
    if any(point.count > 1 for point in series.points):
        edge = [f"{x} {high}" for x, _, _, high in places]
        edge += [f"{x} {low}" for x, _, low, _ in reversed(places)]
        found.append((f"band {series.style}", f"M{'L'.join(edge)}Z"))
    line = "L".join(f"{x} {y}" for x, y, _, _ in places)
    found.append((f"line {series.style}", f"M{line}" if len(places) > 1 else f"M{line}h0"))
    if series.dots and len(places) <= 40:
        found.append((f"dots {series.style}", "".join(f"M{x} {y}h0" for x, y, _, _ in places)))
    return found


def _unit(share: float) -> int:
    return round(UNITS * min(max(share, 0.0), 1.0))


def _columns(first: float, last: float, across: str, form: Form) -> list[Mark]:
    """Returns the ends of the horizontal axis."""
    if first == last:
        return [Mark(0.0, f"{across} {form(first)}")]
    return [Mark(0.0, form(first)), Mark(100.0, f"{across} {form(last)}")]


def _notes(series: Sequence[Series], up: Axis, *, joins: bool) -> list[str]:
    """Returns what one must know to read a chart; if it `joins`, how many points each one stands for."""
    joined = max(point.count for each in series for point in each.points)
    notes = [f"means and range of {joined} points"] if joins and joined > 1 else []
    return [*notes, "logarithmic scale"] if up.logarithmic else notes


def _end(series: Series, along: Axis, up: Axis, form: Form) -> Mark:
    """Returns the label beside a curve's last point."""
    last = series.points[-1]
    across = min(100.0, 100 * along.share(last.x))
    if across > 96:
        across = 100.0
    return Mark(100 - 100 * up.share(last.y), form(last.y), series.style, round(across, 1))


def _apart(ends: Sequence[Mark], height: int) -> list[Mark]:
    """Returns labels at heights where none hides another."""
    gap, found = 100 * LETTERS / height, list[Mark]()
    for mark in sorted(ends, key=lambda mark: mark.place):
        place = max(mark.place, found[-1].place + gap) if found else mark.place
        found.append(replace(mark, place=place))
    over = found[-1].place - 100 if found else 0.0
    if over > 0:  # push those at the bottom up again
        most = 100.0
        for index in range(len(found) - 1, -1, -1):
            found[index] = replace(found[index], place=min(found[index].place, most))
            most = found[index].place - gap
    return [replace(mark, place=round(mark.place, 1)) for mark in found]


def _told(series: Series, form: Form) -> str:
    """Returns a curve in words, for those who do not see it."""
    first, last = series.points[0], series.points[-1]
    if first is last:
        return f"{series.label} {form(first.y)}"
    return f"{series.label} from {form(first.y)} to {form(last.y)}"
