"""The text and the figure of `pipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.harness import Data, Panel, Target, table

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


def text(data: Data) -> list[str]:
    """Returns a table of each place, and the lines that follow from them; those without a bound, too."""
    lines: list[str] = []
    for place in data["places"]:
        columns = tuple((title, key, spec, float(factor)) for title, key, spec, factor in _COLUMNS)
        lines += ["", _title(place), *table(place["rows"], columns)]
    lines += ["", *map(_line, data["lines"])]
    return lines + [f"not run: {name}: {reason}" for name, reason in data["not_run"].items()]


def targets(lines: Sequence[Data]) -> list[Target]:
    """Returns what lines must be."""
    found = []
    for line in lines:
        least, most = line.get("between", (None, None))
        if line.get("must") is not None:
            least, most = (line["must"], None) if line["at_least"] else (None, line["must"])
        found.append(Target(line["what"], line["value"], least, most))
    return found


def _title(place: Data) -> str:
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


def _line(line: Data) -> str:
    value = "not run" if line["value"] is None else f"{line['value']:.3f}"
    error = f" +- {line['error']:.3f}" if line.get("error") is not None else ""
    worst = f", in the worst turn {line['worst']:.3f}" if "worst" in line else ""
    return f"{line['section']}: {line['what']}: {value}{error}{worst}"


def panels(data: Data) -> list[Panel]:
    """Returns the figure: throughput, bubbles of stages that sleep, and completion times of tasks."""
    found = []
    for place in data["places"]:
        rows, title = place["rows"], _title(place).partition(";")[0]
        if place["name"] == "tasks":
            points: dict[str, dict[Any, float]] = {}
            for name, row in rows.items():
                count, _, way = name.removeprefix("tasks=").partition(" ")
                points.setdefault(way, {})[int(count)] = row["mean_completion_seconds"]
            found.append(Panel("mean completion time, s", points, title, "tasks", bars=False))
            continue
        keys = ("bubble", "simulated_bubble") if place["sleep"] else ("tokens_per_second",)
        series = {key: {n: row[key] for n, row in rows.items() if row[key] is not None} for key in keys}
        found.append(Panel(", ".join(keys), series, title))
    return found
