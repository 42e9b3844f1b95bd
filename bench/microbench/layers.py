"""Sections of the suite that measure linear layers: operators, linears, adapters, ablation, fused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from linear.contenders import Layer, Run, frozen_fused, ours_fused, sharing
from linear.layouts import LAYOUTS, mixed_ranks
from linear.limits import Work, frozen, low_rank
from linear.oracle import Entry, compare
from shared.results import dtype_name
from shared.shapes import MODELS, SHARE_X, Linear
from torch import Tensor

from microbench.entries import FROZEN, Shape, entries, measure, whole_row
from microbench.settings import Case, Findings, Settings

MANY = (1, 2, 4, 8, 16, 32, 64)


def operators(settings: Settings, findings: Findings) -> Iterator[Case]:
    """Forward and backward apart, on the shapes of the first model, with one rank and with mixed ones."""
    chosen = pick(settings, FROZEN, "PEFT loop", "addmm_ loop", "grouped", "ours", "p=0")
    model = settings.models[0]
    for layout, adapters, linear in product(settings.layouts, settings.numbers, MODELS[model].linears):
        for ranks, part in product(([16] * adapters, mixed_ranks(adapters)), ("forward", "backward")):
            for shape in shapes(settings, findings, model, linear, ranks, layout):
                yield case(shape, chosen, settings, findings, part=part)


def linears(settings: Settings, findings: Findings) -> Iterator[Case]:
    """Forward and backward of every linear layer of the models, mixed ranks; balanced rows first."""
    chosen = pick(settings, FROZEN, "PEFT loop", "addmm_ loop", "grouped", "ours", "p=0")
    for layout, adapters, model in product(settings.layouts, settings.numbers, settings.models):
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


Groups = list[list[Layer]]


def groups(model: str, lengths: list[int], settings: Settings, dtype: torch.dtype) -> Groups:
    """Random layers; those of a group share x."""
    sizes, ranks = MODELS[model].seven, mixed_ranks(len(lengths))
    return [
        sharing(
            [
                Layer.random(lengths, ranks, *sizes[name], dtype, settings.dropout, settings.device)
                for name in names
            ]
        )
        for names in SHARE_X
    ]


def builders(found: Groups, settings: Settings) -> dict[str, Callable[[], Run]]:
    """Makes of each contender, by name; each goes through all groups in one run."""

    def all_of(each: Callable[[list[Layer]], Run], parts: Groups) -> Run:
        runs = [each(part) for part in parts]
        return lambda: [result for run in runs for result in run()]

    made = {FROZEN: partial(all_of, frozen_fused, found)}
    for backend in settings.backends:
        name, run = f"ours, {backend}", partial(ours_fused, backend=backend)
        made[f"{name}, layer by layer"] = partial(all_of, run, [[one] for part in found for one in part])
        made[f"{name}, fused"] = partial(all_of, run, found)
        without = [[replace(one, p=0.0) for one in part] for part in found]
        made[f"{name}, fused, p=0"] = partial(all_of, run, without)
        if settings.device.type == "cuda":
            floats = [[one.with_fp32_adapters() for one in part] for part in found]
            made[f"{name}, fused, fp32 adapters"] = partial(all_of, run, floats)
    return made


def check_fused(name: str, layers: Groups, settings: Settings, dtype: torch.dtype) -> float:
    """The largest error of a contender, against the plain operator in fp64.

    Raises:
        WrongResult: if it is too large; names the contender.
    """
    exact = [sharing([one.exact() for one in part]) for part in layers]
    if name.endswith("p=0"):
        exact = [[replace(one, p=0.0) for one in part] for part in exact]
    if name.endswith("layer by layer"):
        exact = [[one] for part in exact for one in part]
    want: list[Tensor] = []
    for part in exact:
        want += frozen_fused(part)() if name == FROZEN else ours_fused(part, "reference")()
    return compare(name, builders(layers, settings)[name]()(), want, dtype)


def fused(settings: Settings, findings: Findings) -> Iterator[Case]:
    """One row for each model, layout and dtype."""
    sizes = (settings.layouts, settings.numbers, settings.models, settings.rows, settings.dtypes)
    for layout, adapters, model, rows, dtype in product(*sizes):
        batch = f"{rows} rows, {adapters} adapters, {layout}, {dtype_name(dtype)}"
        case = partial(fused_row, model, layout, adapters, rows, dtype, settings, findings)
        yield Case(f"{model} seven linears, {batch}", case)


def fused_row(
    model: str,
    layout: str,
    adapters: int,
    rows: int,
    dtype: torch.dtype,
    settings: Settings,
    findings: Findings,
) -> dict[str, Any]:
    """One row of results."""
    lengths, ranks = LAYOUTS[layout](rows, adapters), mixed_ranks(adapters)
    small = groups("quick", [5, 1, 70, 21], settings, dtype)
    layers = groups(model, lengths, settings, dtype)
    sizes = [(*shape, dtype.itemsize) for shape in MODELS[model].seven.values()]
    products = sum((frozen(rows, *each) for each in sizes), Work())
    extra = sum((low_rank(lengths, ranks, *each) for each in sizes), Work())

    def check(name: str) -> float:
        return check_fused(name, layers if settings.check else small, settings, dtype)

    def refresh() -> None:
        for part in layers:
            for layer in part:
                layer.refresh()

    about = {"name": f"{model} seven linears", "model": model, "count": 1, "rows": rows, "adapters": adapters}
    about |= {"ranks": ranks, "layout": layout}
    made = builders(layers, settings)
    return whole_row(about, made, check, refresh, (products, extra), dtype, settings, findings)
