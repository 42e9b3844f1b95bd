"""One linear layer with several adapters, forward and backward, against the same layer without adapters.

    python -m bench linear                                 # fp32 and bf16, five shapes, 2 threads
    python -m bench linear --dtype bfloat16 --shapes 512x1024x1024x8 --out linear

In one run, taking turns, medians: the frozen layer (`F.linear` and dX), the same by the library that
mlora_ext chose, PEFT's layers in a loop, a loop of `addmm_` with dropout and without it ("p=0"), ours in any
loop, ours as `Engine` trains ("held": adapters keep their gradients, in fp32), and ours with packed weights
(`pack_base`: about three times their memory). First ours and the loops are checked against the fp64 oracle.
At its turn each runs twice. The second call counts: in training, a layer's code has just run for the layer
before. The first follows another contender, which has filled the caches with code and data of its own; its
ratio stands under "1st". "limit" is the least time for the low-rank part alone: its bytes at the speed of a
copy or its FLOPs at the speed of the chosen GEMM, whichever is longer.
Exits with 1, after results are written, where plain weights miss a "must" or something else used the
processors.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from shared import machine
from shared.harness import Found, Panel, Target, measured, table
from shared.results import dtype_name
from shared.timing import take_turns

from linear import contenders, limits, peers
from linear.contenders import Layer
from linear.layouts import balanced
from linear.limits import copy_speed
from linear.oracle import Entry, Oracle, WrongResult
from mlora_ext.frozen.packed import PackedWeight

RANK = 16
# (T, d_in, d_out, adapters): what must be reached as a multiple of the frozen layer's time, by dtype
TARGETS = {
    (2048, 2048, 2048, 4): {"float32": 1.06, "bfloat16": 1.10},
    (2048, 1024, 1024, 4): {"float32": 1.09, "bfloat16": 1.20},
    (1024, 2048, 5632, 8): {"float32": 1.05, "bfloat16": 1.08},
    (512, 1024, 1024, 8): {"float32": 1.12, "bfloat16": 1.22},
    (2048, 2048, 512, 4): {"float32": 1.14, "bfloat16": 1.27},
}
SLOWER = 1.03
"""How much slower than a loop without dropout ours may be, with dropout."""
BUSY = 0.9
"""Of the threads' time, of which the processors must work; PEFT's loop leaves them idle by itself."""
Shape = tuple[int, int, int, int]
RATIOS = {
    "PEFT": "peft",
    "addmm_": "addmm",
    "p=0": "addmm_without_dropout",
    "ours": "ours",
    "held": "ours_held",
    "packed": "ours_packed",
    "fp32 A,B": "ours_fp32_adapters",
}
"""Columns of times over the frozen layer's."""
COLUMNS = (
    ("frozen ms", "frozen", "8.2f", 1e3),
    ("gemm ms", "gemm", "8.2f", 1e3),
    ("ours ms", "ours_seconds", "8.2f", 1e3),
    *((name, name, "6.3f", 1.0) for name in RATIOS),
    ("1st", "first", "6.3f", 1.0),
    ("ours/gemm", "ours_to_gemm", "6.3f", 1.0),
    ("added ms", "added_seconds", "6.2f", 1e3),
    ("limit ms", "limit_seconds", "6.2f", 1e3),
)


def check(dtype: torch.dtype) -> None:
    """Stops the benchmark when a contender computes something else than the oracle does.

    Raises:
        SystemExit: naming the contender and its error.
    """
    entries = [
        Entry("ours", contenders.ours, own_masks=False),
        Entry("ours, held", contenders.ours_held, own_masks=False),
        Entry(
            "ours, packed",
            lambda layer: contenders.ours(layer, PackedWeight.of(layer.weight)),
            own_masks=False,
        ),
        Entry("PEFT loop", peers.peft_loop),
        Entry("addmm_ loop", peers.addmm_loop),
    ]
    for p in (0.0, 0.1):
        oracle = Oracle(Layer.random(balanced(96, 3), [8] * 3, 160, 224, dtype, p))
        for entry in entries:
            try:
                oracle.check(entry)
            except WrongResult as wrong:
                raise SystemExit(f"{wrong}, p={p}") from None


def bench(shape: Shape, dtype: torch.dtype, p: float, turns: int, bytes_per_second: float) -> dict[str, Any]:
    """Returns one row of the table."""
    rows, d_in, d_out, adapters = shape
    lengths, ranks = balanced(rows, adapters), [RANK] * adapters
    layer = Layer.random(lengths, ranks, d_in, d_out, dtype, p)
    cases: dict[str, contenders.Run] = {
        "frozen": contenders.frozen(layer),
        "gemm": contenders.chosen_gemm(layer),
        "peft": peers.peft_loop(layer),
        "addmm": peers.addmm_loop(layer),
        "addmm_without_dropout": peers.addmm_loop(replace(layer, p=0.0)),
        "ours": contenders.ours(layer),
        "ours_held": contenders.ours_held(layer),
    }
    packed = PackedWeight.of(layer.weight)
    if packed.fused(layer.x).packed is not None:
        cases["ours_packed"] = contenders.ours(layer, packed)
    if dtype != torch.float32:
        cases["ours_fp32_adapters"] = contenders.ours(layer.with_fp32_adapters())
    timings = take_turns(cases, layer.refresh, turns)
    element = layer.x.element_size()
    work = limits.low_rank(lengths, ranks, d_in, d_out, element)
    rate = limits.frozen(rows, d_in, d_out, element).flops / timings["gemm"].seconds
    least = limits.Ceilings(bytes_per_second, rate).seconds(work)
    seconds = {name: timing.seconds for name, timing in timings.items()}
    name = dtype_name(dtype)
    return {
        "shape": shape,
        "dtype": name,
        "dropout": p,
        "seconds": seconds,
        "ratio_to_frozen": {key: value / seconds["frozen"] for key, value in seconds.items()},
        "first_call_ratio_to_frozen": {
            key: timing.first / timings["frozen"].first for key, timing in timings.items()
        },
        "ours_to_gemm": seconds["ours"] / seconds["gemm"],
        "added_seconds": seconds["ours"] - seconds["gemm"],
        "must": TARGETS.get(shape, {}).get(name),
        "limit": {"flops": work.flops, "bytes": work.bytes, "seconds": least},
        "processors": {key: timing.processors for key, timing in timings.items()},
    }


def name_of(row: dict[str, Any]) -> str:
    """Returns a row's shape and dtype in words."""
    return f"{'x'.join(map(str, row['shape']))} {row['dtype']}"


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row's cells."""
    ratios = {name: row["ratio_to_frozen"].get(key) for name, key in RATIOS.items()}
    seconds = {"frozen": row["seconds"]["frozen"], "gemm": row["seconds"]["gemm"]}
    more = {"ours_seconds": row["seconds"]["ours"], "limit_seconds": row["limit"]["seconds"]}
    return {**row, **ratios, **seconds, **more, "first": row["first_call_ratio_to_frozen"]["ours"]}


def targets(rows: Sequence[dict[str, Any]], threads: int) -> list[Target]:
    """Returns what these results must show, and that nothing else had the processors."""
    must = []
    for row in rows:
        ratios = row["ratio_to_frozen"]
        if row["must"]:
            must.append(Target(f"{name_of(row)}: ours / frozen", ratios["ours"], most=row["must"]))
        if loop := ratios.get("addmm_without_dropout"):
            best = min(ratios[key] for key in ("ours", "ours_held"))
            what = f"{name_of(row)}: ours or held / the loop of addmm_ without dropout"
            must.append(Target(what, best / loop, most=SLOWER))
    busy = min(value for row in rows for name, value in row["processors"].items() if name != "peft")
    return [
        *must,
        Target("processor time / wall time, worst case; below it SOMETHING ELSE RAN", busy, BUSY * threads),
    ]


def parse_shape(text: str) -> Shape:
    """`T x d_in x d_out x adapters`."""
    parts = tuple(int(part) for part in text.split("x"))
    if len(parts) != 4 or min(parts) < 1:
        raise argparse.ArgumentTypeError(f"expected TxD_INxD_OUTxADAPTERS, got {text}")
    return parts  # type: ignore[return-value]


def measure(options: argparse.Namespace) -> Found:
    """Checks all contenders, and measures every shape in every dtype."""
    dtypes = [getattr(torch, name) for name in options.dtype]
    for dtype in dtypes:
        check(dtype)
    speed, info = copy_speed(), machine.describe()
    shapes = options.shapes or ([(96, 64, 96, 3)] if options.quick else list(TARGETS))
    rows = [
        bench(shape, dtype, options.dropout, options.turns, speed) for dtype in dtypes for shape in shapes
    ]
    lines = [
        f"kernels {info.get('kernels')}, copy {speed / 1e9:.1f} GB/s, base {info.get('base_gemm')}",
        f"dropout {options.dropout}, r = {RANK}; PEFT to fp32 A,B, and 1st: time / frozen F.linear + dX",
        "",
        *table({name_of(row): shown(row) for row in rows}, COLUMNS),
    ]
    series = {
        name: {name_of(row): row["ratio_to_frozen"][key] for row in rows if key in row["ratio_to_frozen"]}
        for name, key in RATIOS.items()
    }
    panel = Panel("time / frozen F.linear + dX", series)
    return Found(
        {"copy_bytes_per_second": speed, "rows": rows}, lines, targets(rows, options.threads), [panel]
    )


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    parser.add_argument("--shapes", type=parse_shape, nargs="+", metavar="TxDxOxN")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--dropout", type=float, default=0.1)


def main() -> int:
    """Measures, prints, and writes the results."""
    return measured(__doc__, measure, out="linear-cpu", turns=15, add=add)
