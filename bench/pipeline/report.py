"""The text and the figure of `bench_pipeline.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from shared.figures import about, figure
from shared.results import cell, width

_COLUMNS = (
    ("tokens/s", "tokens_per_second", "10.1f", 1),
    ("steady", "steady_tokens_per_second", "10.1f", 1),
    ("bubble %", "bubble", "9.1f", 100),
    ("simulated", "simulated_bubble", "9.1f", 100),
    ("+-%", "spread", "6.1f", 100),
    ("processors", "processors", "10.2f", 1),
    ("others %", "other_processes_share", "8.1f", 100),
    ("mean end s", "mean_completion_seconds", "10.2f", 1),
)


def text(data: Mapping[str, Any]) -> str:
    """Everything as a table."""
    machine = data["machine"]
    command = re.sub(r" --out \S+", "", machine["command"])
    lines = [
        f"{machine['processor']}, {machine['logical_cores']} cores, torch {machine['torch']}, "
        f"commit {machine['commit']}, {machine['date']}: {command}",
    ]
    if data["quick"]:
        lines.append("--quick: sizes that show nothing")
    for place in data["places"]:
        lines += ["", _title(place)]
        titles = "".join(f"{title:>{width(spec) + 1}}" for title, _, spec, _ in _COLUMNS)
        lines.append(f"  {'':34}{titles}")
        lines += [_row(name, row) for name, row in place["rows"].items()]
    missed = misses(data)
    lines += ["", *(_line(line) + (" MISSED" if line in missed else "") for line in data["lines"])]
    lines += [f"not run: {name}: {reason}" for name, reason in data["not_run"].items()]
    return "\n".join(lines) + "\n"


def misses(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The lines whose value is not what it must be; none of `--quick`, whose sizes show nothing."""
    return [] if data["quick"] else [line for line in data["lines"] if not _reached(line)]


def _reached(line: Mapping[str, Any]) -> bool:
    value: float | None = line["value"]
    if value is None:
        return False
    if "between" in line:
        least, most = line["between"]
    elif line["must"] is None:
        return True
    else:
        least, most = (line["must"], inf) if line["at_least"] else (-inf, line["must"])
    return bool(least <= value <= most)


def _title(place: Mapping[str, Any]) -> str:
    if place["sleep"]:
        ms = [1e3 * place["sleep"][way] for way in ("forward", "backward")]
        return (
            f"{place['name']}: {place['stages']} processes of SLEEP KERNELS ({ms[0]:g} ms forward, "
            f"{ms[1]:g} ms backward); micro-batches/s instead of tokens/s"
        )
    sizes = {name: value for name, value in place["shape"].items() if name != "targets"}
    shape = ", ".join(f"{name} {value}" for name, value in sizes.items())
    shape += f"; LoRA on {', '.join(place['shape']['targets'])}"
    wire = f", between two network namespaces at {place['rate']}" if place["network"] else ""
    return f"{place['name']}: {place['stages']} processes of one thread{wire}; {shape}"


def _row(name: str, row: Mapping[str, Any]) -> str:
    cells = [" " + cell(row.get(key), spec, factor) for _, key, spec, factor in _COLUMNS]
    return f"  {name:34}{''.join(cells)}"


def _line(line: Mapping[str, Any]) -> str:
    value = "not run" if line["value"] is None else f"{line['value']:.3f}"
    words = f"{line['section']}: {line['what']}: {value}"
    if line.get("error") is not None:
        words += f" +- {line['error']:.3f}"
    if "worst" in line:
        words += f", in the worst turn {line['worst']:.3f}"
    if "between" in line:
        return f"{words} (must be between {line['between'][0]} and {line['between'][1]})"
    if line["must"] is None:
        return words
    return f"{words} (must be at {'least' if line['at_least'] else 'most'} {line['must']})"


def plot(data: Mapping[str, Any], path: Path) -> None:
    """Draw throughput, bubbles and completion times.

    Args:
        data: what `pipeline.json` holds.
        path: of the PNG.
    """
    places = data["places"]
    options = {"figsize": (11, 3.4 * len(places)), "squeeze": False, "layout": "constrained"}
    with figure(path, len(places), dpi=100, **options) as (drawn, axes):
        left = iter(axes[:, 0])
        for place in places:
            if place["sleep"]:
                _bubbles(next(left), place)
            elif place["name"] == "tasks":
                _completion(next(left), place)
            else:
                _throughput(next(left), place)
        drawn.suptitle(about(data["machine"], quick=data["quick"]))


def _throughput(axes: Any, place: Mapping[str, Any]) -> None:
    rows = place["rows"]
    bars = axes.bar(list(rows), [row["tokens_per_second"] for row in rows.values()])
    shown = [f"bubble {row['bubble']:.0%}" if row["bubble"] is not None else "" for row in rows.values()]
    axes.bar_label(bars, shown, fontsize=6)
    axes.set_ylabel("tokens/s")
    _name(axes, place, list(rows))


def _bubbles(axes: Any, place: Mapping[str, Any]) -> None:
    rows = {name: row for name, row in place["rows"].items() if row["bubble"] is not None}
    spots = range(len(rows))
    for shift, key, label in ((-0.2, "bubble", "measured"), (0.2, "simulated_bubble", "simulated")):
        heights = [100 * (row[key] or 0.0) for row in rows.values()]
        axes.bar([spot + shift for spot in spots], heights, 0.4, label=label)
    axes.set_ylabel("bubble in the steady window, %")
    axes.set_xticks(spots)
    axes.legend(fontsize=7)
    _name(axes, place, list(rows))


def _completion(axes: Any, place: Mapping[str, Any]) -> None:
    """Mean completion time against the number of tasks."""
    points: dict[str, list[tuple[int, float]]] = {}
    for name in place["rows"]:
        count, _, way = name.removeprefix("tasks=").partition(" ")
        points.setdefault(way, []).append((int(count), place["rows"][name]["mean_completion_seconds"]))
    for way, found in points.items():
        axes.plot(*zip(*found, strict=True), "o-", label=way)
    axes.set_xlabel("tasks")
    axes.set_ylabel("mean completion time, s")
    axes.set_title("Tasks at once (lorapp) and one after the other (gpipe, 1f1b)", fontsize=9)
    axes.legend(fontsize=7)


def _name(axes: Any, place: Mapping[str, Any], names: Sequence[str]) -> None:
    axes.set_xticks(range(len(names)), names, fontsize=6, rotation=25, ha="right", rotation_mode="anchor")
    axes.set_title(_title(place).partition(";")[0], fontsize=8)
