"""What all parts print: the machine, tables of turns, and whether targets were met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shared.tables import cell

from offload.turns import QUIET

Data = Mapping[str, Any]


def at_least(what: str, value: float | None, must: float) -> dict[str, Any]:
    """Returns a target that a value must reach."""
    met = value is not None and value >= must
    return {"what": what, "value": value, "must": must, "at_least": True, "met": met}


def at_most(what: str, value: float | None, must: float) -> dict[str, Any]:
    """Returns a target that a value must not exceed."""
    met = value is not None and value <= must
    return {"what": what, "value": value, "must": must, "at_least": False, "met": met}


def missed(data: Data) -> list[str]:
    """Returns which targets were missed; none with `--quick`, where nothing is judged."""
    return [] if data["quick"] else [line["what"] for line in data["must"] if not line["met"]]


def heading(data: Data) -> list[str]:
    """Returns lines about the machine, the command, and whether other processes disturbed it."""
    machine = data["machine"]
    lines = [
        f"{machine['processor']}, {machine['logical_cores']} cores, {machine['memory_gib']} GiB, "
        f"torch {machine['torch']}, commit {machine['commit']}, {machine['date']}: {machine['command']}",
        f"disk: {data['file_system']}, scheduler {data['disk_scheduler'] or 'unknown'}",
    ]
    share = data["other_processes_share"]
    if share is not None:
        loud = "" if share <= QUIET else f": NOT QUIET, at most {QUIET} is allowed"
        lines.append(f"other processes took {share} of the machine{loud}")
    if data["quick"]:
        lines.append("--quick: sizes that show nothing")
    return [*lines, ""]


def verdicts(data: Data) -> list[str]:
    """Returns a line for each target."""
    if data["quick"]:
        return []
    lines = [""]
    for line in data["must"]:
        bound = "at least" if line["at_least"] else "at most"
        value = "nothing" if line["value"] is None else f"{line['value']:.3g}"
        verdict = "met" if line["met"] else "MISSED"
        lines.append(f"{verdict:6}  {line['what']}: {value} (must be {bound} {line['must']:g})")
    return lines


def table(rows: Mapping[str, Data], columns: Sequence[tuple[str, str, str, float]]) -> list[str]:
    """Returns a table.

    Args:
        rows: values by column key, by the row's name.
        columns: of each its title, key, format and the factor that values are multiplied by.
    """
    name_width = max(map(len, rows), default=0)
    widths = [max(len(title), int(spec.partition(".")[0])) for title, _, spec, _ in columns]
    titles = "".join(f"  {title:>{width}}" for (title, *_), width in zip(columns, widths, strict=True))
    lines = [f"{'':{name_width}}{titles}"]
    for name, row in rows.items():
        cells = (cell(row.get(key), spec, factor) for _, key, spec, factor in columns)
        values = "".join(f"  {one:>{width}}" for one, width in zip(cells, widths, strict=True))
        lines.append(f"{name:{name_width}}{values}")
    return lines


SECONDS = (("ms", "seconds", "9.1f", 1e3), ("+-%", "spread", "6.1f", 100), ("cpus", "processors", "6.2f", 1))
"""Columns of what `turns.medians` returns."""
