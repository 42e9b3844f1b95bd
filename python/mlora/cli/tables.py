"""Tables of commands, and the table of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlora.cli.output import terminal
from mlora.errors import visible
from mlora.tasks.result import columns_of


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines, with control characters escaped."""
    for line in lines:
        print(visible(line))


def print_rows(rows: list[list[str]]) -> None:
    """Prints rows, titles first, as a table on a terminal and as aligned lines elsewhere.

    Control characters are escaped, and nothing is read as markup.
    """
    rows = [[visible(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        print(aligned(rows))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for column, title in enumerate(rows[0]):
        table.add_column(Text(title), justify="left" if column < 2 else "right")
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    Console(file=terminal(), highlight=False).print(table)


def result_table(summary: dict[str, Any], more: Mapping[str, Sequence[str]] | None = None) -> list[list[str]]:
    """Returns the rows of a run's table, titles first; empty columns are left out.

    `summary` is the content of ``summary.json``. `more` holds further columns: title and a cell per adapter.
    """
    entries = list(summary["adapters"].values())
    # of evaluations, which have a field of their own for accuracy
    names = ["accuracy", *(n for e in entries for key in ("metrics", "eval_metrics") for n in e.get(key, ()))]
    metrics = columns_of(dict.fromkeys(names))
    over = summary["status"] != "running"
    columns: list[tuple[str, Sequence[str]]] = [
        ("adapter", list(summary["adapters"])),
        ("state", ["unfinished" if over and e["state"] == "running" else e["state"] for e in entries]),
        ("step", [f"{e['step']}" + ("" if (n := e["max_steps"]) is None else f"/{n}") for e in entries]),
        ("loss", [_number(entry["loss"], ".4f") for entry in entries]),
    ]
    pairs = [("eval loss", ".4f", [entry["eval_loss"] for entry in entries])]
    pairs += [("exact match", ".1%", [entry["eval_exact_match"] for entry in entries])]
    for name, (title, form) in metrics.items():
        columns += [(title, [_number(_last_metric(entry, name), form) for entry in entries])]
        pairs += [(f"eval {title}", form, [_evaluated(entry, name) for entry in entries])]
    for title, form, values in pairs:
        for head, when in ((f"{title} before", "before"), ("after", "after")):
            columns += [(head, [_number(pair.get(when), form) for pair in values])]
    columns += [("best step", [_best(entry) for entry in entries]), *(more or {}).items()]
    used = [(title, cells) for title, cells in columns if any(cells)]
    rows = zip(*(cells for _, cells in used), strict=True)
    return [[title for title, _ in used], *map(list, rows)]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _evaluated(entry: Mapping[str, Any], name: str) -> Mapping[str, float | None]:
    found: Mapping[str, float | None] | None = entry.get("eval_metrics", {}).get(name)
    return found or (entry.get("eval_accuracy", {}) if name == "accuracy" else {})


def _last_metric(entry: Mapping[str, Any], name: str) -> float | None:
    """Returns a metric of the last step; None where evaluations measure it."""
    if any(value is not None for value in _evaluated(entry, name).values()):
        return None
    found: float | None = entry.get("metrics", {}).get(name)
    return found


def _best(entry: Mapping[str, Any]) -> str:
    """Returns the step of the best evaluation, and the saved step if it differs."""
    if not entry.get("best"):
        return ""
    step, saved = entry["best"]["step"], entry.get("saved_step")
    return f"{step}" if saved in (None, step) else f"{step}, saved {saved}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of text as aligned lines, which nothing wraps."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
    return "\n".join(lines)
