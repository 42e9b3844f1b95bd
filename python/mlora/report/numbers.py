"""Numbers as people read them."""

from __future__ import annotations

import math

NOTHING = "\N{EN DASH}"


def number(value: float | None) -> str:
    """Returns three significant digits, more of large whole numbers: ``0.0312``, ``7.04``, ``12,345``."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def loss(value: float | None) -> str:
    """Returns three significant digits with their zeros, for columns: ``0.100``, ``7.04``."""
    return number(value) if value is None or not 1e-3 <= abs(value) < 999.5 else f"{value:#.3g}"


def percent(value: float | None) -> str:
    """Returns a share between 0 and 1 as per cent: ``96.3%``."""
    if value is None:
        return NOTHING
    return f"{value:.1%}".replace(".0%", "%")


def size(value: float | None) -> str:
    """Returns bytes with a unit: ``754 MiB``, ``1.2 GiB``."""
    if value is None:
        return NOTHING
    if not value:
        return "0"
    for unit, bytes_ in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        found = value / bytes_
        if found >= 1:
            return f"{number(found)} {unit}"
    return f"{value / 2**10:.3g} KiB"


def duration(seconds: float | None) -> str:
    """Returns seconds as ``41 s``, ``1 min 21 s``, ``2 h 5 min`` or ``3 d 4 h``."""
    if seconds is None:
        return NOTHING
    whole = round(seconds)
    for unit, length, small, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= length:
            rest = whole % length // part
            return f"{whole // length} {unit}" + (f" {rest} {small}" if rest else "")
    return f"{seconds:.2g} s" if 0 < seconds < 1 else f"{whole} s"


def count(value: float) -> str:
    """Returns a count: ``12,345`` below a million, then ``1.83 M``, ``2.41 G``."""
    for unit, amount in (("G", 1e9), ("M", 1e6)):
        if value >= 0.9995 * amount:
            return f"{value / amount:.3g} {unit}"
    return f"{value:,.0f}"
