"""The columns of the table of adapters; how each was trained, and with what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlora.report.numbers import NOTHING, count, duration, loss, number, percent, size
from mlora.report.read import Adapter

_TITLES = {
    "python": "Python",
    "torch": "PyTorch",
    "transformers": "Transformers",
    "peft": "PEFT",
    "cuda": "CUDA",
}


def rank_of(config: Mapping[str, Any]) -> int | None:
    """Returns the rank of an adapter's ``lora`` block; PEFT's default is 8."""
    lora = config.get("lora")
    return None if not isinstance(lora, Mapping) else int(lora.get("r") or 8)


def settings_of(adapter: Adapter) -> list[tuple[str, str]]:
    """Returns name and value of an adapter's most important settings."""
    config = adapter.config
    found: list[tuple[str, str]] = []
    if isinstance(lora := config.get("lora"), Mapping):
        found.append(("rank", str(rank_of(config))))
        found.append(("alpha", number(lora.get("lora_alpha") or 8)))
        if lora.get("target_modules"):
            found.append(("targets", _listed(lora["target_modules"])))
        if lora.get("lora_dropout"):
            found.append(("dropout", number(lora["lora_dropout"])))
        kinds = [name for key, name in (("use_rslora", "rsLoRA"), ("use_dora", "DoRA")) if lora.get(key)]
        if kinds:
            found.append(("kind", ", ".join(kinds)))
    if config.get("init_from"):
        found.append(("starts from", Path(config["init_from"]).name))
    if rate := config.get("learning_rate"):
        schedule = str(config.get("lr_scheduler_type") or "").replace("_", " ")
        found.append(("learning rate", f"{number(rate)}{', ' * bool(schedule)}{schedule}"))
    if batch := config.get("per_device_train_batch_size"):
        times = config.get("gradient_accumulation_steps") or 1
        found.append(("batch size", f"{batch}" + (f" \N{MULTIPLICATION SIGN} {times}" if times != 1 else "")))
    objective = config.get("objective") or "cross_entropy"
    name = objective.get("name") if isinstance(objective, Mapping) else objective
    if name != "cross_entropy":
        found.append(("objective", str(name)))
    for title, key in (("optimizer", "optim"), ("trained on", "dataset"), ("evaluated on", "eval_dataset")):
        if config.get(key):
            found.append((title, str(config[key])))
    if adapter.history.tokens:
        found.append(("tokens", f"{count(adapter.history.tokens)} in {duration(adapter.history.seconds)}"))
    if adapter.history.skipped:
        found.append(("skipped steps", f"{adapter.history.skipped:,}"))
    return found


def _listed(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(map(str, value))


def versions_of(starts: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Returns name and value of what the run's last part trained with; earlier versions that differ, too."""
    if not starts:
        return []
    found = []
    last = starts[-1].get("versions", {})
    for name, version in last.items():
        earlier = [start.get("versions", {}).get(name) for start in starts]
        others = [old for old in dict.fromkeys(earlier) if old not in (None, version)]
        more = f" (before: {', '.join(others)})" if others else ""
        found.append((_TITLES.get(name, name), f"{version}{more}"))
    machine = starts[-1].get("machine", {})
    if machine.get("gpu"):
        found.append(("GPU", f"{machine['gpu']}, {size(machine.get('gpu_bytes'))}"))
    if machine:
        threads = machine.get("threads")
        used = f"{threads} thread{'s' * (threads != 1)} on {machine.get('cores')} cores"
        found.append(("CPU", f"{machine.get('cpu')}, {used}"))
        found.append(("device", str(machine.get("device", ""))))
        found.append(("system", str(machine.get("system", ""))))
    return found


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
