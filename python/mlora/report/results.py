"""The columns of the table of adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlora.report.numbers import NOTHING, loss, number, percent
from mlora.report.read import Adapter
from mlora.report.settings import rank_of


@dataclass(frozen=True)
class Cell:
    """What a cell says, by what its column is sorted, and, of a result before and after, where both lie.

    `places` are per cent of the column's widest value.
    """

    text: str
    key: float | None = None
    before: str = ""
    places: tuple[float, float] | None = None


@dataclass(frozen=True)
class Column:
    """A column; one that is not `narrow` is left out on a phone."""

    title: str
    cells: Sequence[Cell]
    narrow: bool = False
    pair: bool = False


def result_columns(adapters: Sequence[Adapter], shown: Mapping[str, tuple[str, str]]) -> list[Column]:
    """Returns the columns in which any adapter has a value, without name and state; `shown` as in `Run`."""
    entries = [adapter.entry for adapter in adapters]
    names = {name for entry in entries for name in entry.get("eval_metrics", {})}
    steps = [Cell(_steps(entry), entry["step"]) for entry in entries]
    columns = [
        Column("Steps", steps),
        Column("Training loss", [_cell(entry["loss"], loss) for entry in entries]),
        _pairs("Held-out loss", [entry["eval_loss"] for entry in entries], loss),
        _pairs("Exact match", [entry["eval_exact_match"] for entry in entries], percent, whole=1.0),
        _pairs("Accuracy", [entry["eval_accuracy"] for entry in entries], percent, whole=1.0),
    ]
    for name, (title, form) in shown.items():
        if name == "accuracy" and any(entry["eval_accuracy"].get("before") is not None for entry in entries):
            continue
        write, whole = (percent, 1.0) if form.endswith("%") else (number, None)
        title = title[:1].upper() + title[1:]
        if name in names:
            found = [entry["eval_metrics"].get(name, {}) for entry in entries]
            columns.append(_pairs(title, found, write, whole=whole))
        else:
            columns.append(Column(title, [_cell(entry["metrics"].get(name), write) for entry in entries]))
    columns += [
        Column("Best", [_best(entry) for entry in entries]),
        Column("Rank", [_cell(rank_of(adapter.config)) for adapter in adapters]),
        Column("Learning rate", [_cell(adapter.config.get("learning_rate")) for adapter in adapters]),
    ]
    return [column for column in columns if any(cell.key is not None for cell in column.cells)]


def _steps(entry: Mapping[str, Any]) -> str:
    total = entry["max_steps"]
    return f"{entry['step']:,}" + (f" of {total:,}" if total not in (None, entry["step"]) else "")


def _cell(value: float | None, form: Callable[[float | None], str] = number) -> Cell:
    return Cell(form(value), value)


def _best(entry: Mapping[str, Any]) -> Cell:
    best = entry.get("best")
    return Cell(f"{number(best['value'])} at step {best['step']:,}", best["value"]) if best else Cell(NOTHING)


def _pairs(
    title: str,
    pairs: Sequence[Mapping[str, float | None]],
    form: Callable[[float | None], str],
    whole: float | None = None,
) -> Column:
    """Returns a column of results before and after, on one scale."""
    values = [abs(value) for pair in pairs for value in pair.values() if value is not None]
    most = whole or max(values, default=0.0) or 1.0
    cells = []
    for pair in pairs:
        before, after = pair.get("before"), pair.get("after")
        places = None
        if before is not None and after is not None and min(before, after) >= 0:
            places = (round(100 * before / most, 1), round(100 * after / most, 1))
        key = before if after is None else after
        cells.append(Cell(form(after), key, "" if before is None else form(before), places))
    return Column(title, cells, narrow=True, pair=True)
