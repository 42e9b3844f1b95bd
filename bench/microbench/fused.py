"""Section `fused`: the seven linears of a decoder layer; q, k and v are one call, and gate and up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from linear.contenders import Layer, Run, frozen_fused, ours_fused, sharing
from linear.layouts import LAYOUTS, mixed_ranks
from linear.limits import Work, frozen, low_rank
from linear.oracle import Entry, compare
from shared.results import dtype_name
from shared.shapes import MODELS, SHARE_X
from torch import Tensor

from microbench.entries import FROZEN, able, limit, model_entry, timed
from microbench.settings import Case, Findings, Settings

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


def check(name: str, layers: Groups, settings: Settings, dtype: torch.dtype) -> float:
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
    for layout in settings.layouts:
        for adapters in settings.numbers:
            for model in settings.models:
                for rows in settings.rows:
                    for dtype in settings.dtypes:
                        batch = f"{rows} rows, {adapters} adapters, {layout}, {dtype_name(dtype)}"
                        case = partial(row, model, layout, adapters, rows, dtype, settings, findings)
                        yield Case(f"{model} seven linears, {batch}", case)


def row(
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
    named = builders(layers, settings)

    def prepared(entry: Entry) -> Run:
        check(entry.name, layers if settings.check else small, settings, dtype)
        run = named[entry.name]()
        run()
        return run

    entries = [model_entry(name, mine=name != FROZEN) for name in named]
    cases = able(findings, entries, f"{model} fused, {layout}, {dtype_name(dtype)}", prepared)
    sizes = [(*shape, dtype.itemsize) for shape in MODELS[model].seven.values()]
    products = sum((frozen(rows, *each) for each in sizes), Work())
    extra = sum((low_rank(lengths, ranks, *each) for each in sizes), Work())
    work = {name: products + (Work() if name == FROZEN else extra) for name in cases}

    def refresh() -> None:
        for part in layers:
            for layer in part:
                layer.refresh()

    results = timed(cases, refresh, work, settings, steady=True)
    return {
        "name": f"{model} seven linears",
        "model": model,
        "count": 1,
        "rows": rows,
        "adapters": adapters,
        "ranks": ranks,
        "layout": layout,
        "dtype": dtype_name(dtype),
        "dropout": settings.dropout,
        "contenders": results,
        "limit": limit(products, extra, findings.ceiling(settings, dtype), results),
    }
