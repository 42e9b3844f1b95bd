"""Tables of commands, and the table of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlora.cli.output import terminal
from mlora.errors import visible
from mlora.tasks.result import columns_of

Columns = Mapping[str, tuple[str, str]]
"""Title and form of metrics, by name."""


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
    columns = _columns(summary["adapters"].values())
    titles = ["adapter", "state", "step", "loss", *(title for title, _ in columns.values())]
    titles += ["eval loss before", "after", "exact match before", "after"]
    titles += [text for title, _ in columns.values() for text in (f"eval {title} before", "after")]
    rows = [[*titles, "best step"]]
    for name, entry in summary["adapters"].items():
        loss, exact = entry["eval_loss"], entry["eval_exact_match"]
        waits = entry["state"] == "running" and summary["status"] != "running"
        total = "" if entry["max_steps"] is None else f"/{entry['max_steps']}"
        rows.append(
            [
                name,
                "unfinished" if waits else entry["state"],
                f"{entry['step']}{total}",
                _number(entry["loss"], ".4f"),
                *_last_metrics(entry, columns),
                _number(loss.get("before"), ".4f"),
                _number(loss.get("after"), ".4f"),
                _number(exact.get("before"), ".1%"),
                _number(exact.get("after"), ".1%"),
                *_evaluated_metrics(entry, columns),
                _best(entry),
            ]
        )
    for title, cells in (more or {}).items():
        for row, cell in zip(rows, [title, *cells], strict=True):
            row.append(cell)
    used = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    return [[row[column] for column in used] for row in rows]


def _columns(entries: Iterable[Mapping[str, Any]]) -> Columns:
    """Returns the metrics that a table of these adapters shows."""
    names = ["accuracy"]  # of evaluations, which have a field of their own for it
    for entry in entries:
        names += [*entry.get("metrics", ()), *entry.get("eval_metrics", ())]
    return columns_of(dict.fromkeys(names))


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _evaluated(entry: Mapping[str, Any], name: str) -> Mapping[str, float | None]:
    found: Mapping[str, float | None] | None = entry.get("eval_metrics", {}).get(name)
    return found or (entry.get("eval_accuracy", {}) if name == "accuracy" else {})


def _last_metrics(entry: Mapping[str, Any], columns: Columns) -> list[str]:
    """Returns the metrics of the last step; empty where evaluations measure them."""
    last = {name: value for name, value in entry.get("metrics", {}).items() if name in columns}
    for name in columns:
        if any(value is not None for value in _evaluated(entry, name).values()):
            last.pop(name, None)
    return [_number(last.get(name), form) for name, (_, form) in columns.items()]


def _evaluated_metrics(entry: Mapping[str, Any], columns: Columns) -> list[str]:
    """Returns the metrics of evaluations, before and after."""
    return [
        _number(_evaluated(entry, name).get(when), form)
        for name, (_, form) in columns.items()
        for when in ("before", "after")
    ]


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
