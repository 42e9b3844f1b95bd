"""Sections of the suite that measure one layer: operators, linears, adapters, ablation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from linear.layouts import mixed_ranks
from linear.oracle import Entry
from shared.results import dtype_name
from shared.shapes import MODELS, Linear

from microbench.entries import FROZEN, Shape, entries, measure
from microbench.settings import Case, Findings, Settings

MANY = (1, 2, 4, 8, 16, 32, 64)


def operators(settings: Settings, findings: Findings) -> Iterator[Case]:
    """Forward and backward apart, on the shapes of the first model, with one rank and with mixed ones."""
    chosen = pick(settings, FROZEN, "PEFT loop", "addmm_ loop", "grouped", "ours", "p=0")
    for layout in settings.layouts:
        for adapters in settings.numbers:
            for linear in MODELS[settings.models[0]].linears:
                for ranks in ([16] * adapters, mixed_ranks(adapters)):
                    for part in ("forward", "backward"):
                        for shape in shapes(settings, findings, settings.models[0], linear, ranks, layout):
                            yield case(shape, chosen, settings, findings, part=part)


def linears(settings: Settings, findings: Findings) -> Iterator[Case]:
    """Forward and backward of every linear layer of the models, mixed ranks; balanced rows first."""
    chosen = pick(settings, FROZEN, "PEFT loop", "addmm_ loop", "grouped", "ours", "p=0")
    for layout in settings.layouts:
        for adapters in settings.numbers:
            for model in settings.models:
                for linear in MODELS[model].linears:
                    for shape in shapes(settings, findings, model, linear, mixed_ranks(adapters), layout):
                        yield case(shape, chosen, settings, findings, model=model, count=linear.count)


def adapters(settings: Settings, findings: Findings) -> Iterator[Case]:
    """The same rows spread over 1 to 64 adapters: time, launches, and their share of the time on a GPU."""
    chosen = pick(settings, FROZEN, "PEFT loop", "addmm_ loop", "ours")
    for model in settings.models[:1]:
        linear = MODELS[model].linears[0]
        for number in settings.adapters or (MANY[:3] if settings.quick else MANY):
            for shape in shapes(settings, findings, model, linear, mixed_ranks(number), "balanced"):
                yield case(shape, chosen, settings, findings, steady=True)


def ablation(settings: Settings, findings: Findings) -> Iterator[Case]:
    """With and without in-place scatter, as in the mLoRA paper: time and peak memory."""
    chosen = pick(settings, FROZEN, "addmm_ loop", "parts, cat, add", "ours")
    for model in settings.models[:1]:
        for number in settings.adapters or ((3,) if settings.quick else (4, 16)):
            for linear in MODELS[model].linears:
                for shape in shapes(settings, findings, model, linear, mixed_ranks(number), "balanced"):
                    yield case(shape, chosen, settings, findings)


def pick(settings: Settings, *wanted: str) -> list[Entry]:
    """Entries by the beginnings of their names; `p=0` adds ours without dropout where there is any."""
    found = []
    for name, entry in entries(settings).items():
        without = name.startswith("ours") and name.endswith("p=0")
        if (without and "p=0" in wanted and settings.dropout) or (
            not without and name.startswith(tuple(wanted))
        ):
            found.append(entry)
    return found


def shapes(
    settings: Settings,
    findings: Findings,
    model: str,
    linear: Linear,
    ranks: Sequence[int],
    layout: str,
) -> Iterator[Shape]:
    """One linear layer in every dtype and number of rows."""
    name = f"{model} {'/'.join(name.removesuffix('_proj') for name in linear.names)}"
    for dtype in settings.dtypes:
        for rows in settings.rows:
            if rows < len(ranks):
                findings.skipped[f"{name}, {rows} rows"] = f"fewer rows than adapters ({len(ranks)})"
            else:
                yield Shape(name, linear.d_in, linear.d_out, rows, tuple(ranks), layout, dtype)


def case(
    shape: Shape,
    chosen: Sequence[Entry],
    settings: Settings,
    findings: Findings,
    part: str = "both",
    steady: bool = False,
    **more: Any,
) -> Case:
    """One row, measured when its turn comes, without those that the small check refused."""
    ranks = "/".join(map(str, sorted(set(shape.ranks))))
    label = (
        f"{shape.name} {shape.rows} x {shape.d_in} x {shape.d_out}, {len(shape.ranks)} adapters, "
        f"r {ranks}, {shape.layout}, {dtype_name(shape.dtype)}" + (f", {part}" if part != "both" else "")
    )

    def run() -> dict[str, Any]:
        checked = findings.checks[dtype_name(shape.dtype)]
        able = [entry for entry in chosen if entry.name in checked]
        return measure(shape, able, settings, findings, part, steady) | more

    return Case(label, run)
