"""One linear layer with several adapters, forward and backward, against the same layer without adapters.

    python bench/bench_linear.py                                 # fp32 and bf16, five shapes, 2 threads
    python bench/bench_linear.py --dtype bfloat16 --shapes 512x1024x1024x8 --out linear

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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from shared import machine
from shared.results import RESULTS, write_json
from shared.results import dtype_name
from shared.timing import take_turns

from linear import contenders, limits, peers
from linear.contenders import Layer
from linear.layouts import balanced
from linear.limits import copy_speed
from linear.oracle import Entry, Oracle, WrongResult
from linear.report import HEADER, busy, faults, line, plot
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
Shape = tuple[int, int, int, int]


def check(dtype: torch.dtype) -> None:
    """Stop the benchmark when a contender computes something else than the oracle does.

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
    """One row of the table."""
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


def parse_shape(text: str) -> Shape:
    """`T x d_in x d_out x adapters`."""
    parts = tuple(int(part) for part in text.split("x"))
    if len(parts) != 4 or min(parts) < 1:
        raise argparse.ArgumentTypeError(f"expected TxD_INxD_OUTxADAPTERS, got {text}")
    return parts  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", type=parse_shape, nargs="+", default=list(TARGETS), metavar="TxDxOxN")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write OUT.json, OUT.png and OUT.txt")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtypes = [getattr(torch, name) for name in arguments.dtype]
    for dtype in dtypes:
        check(dtype)
    info = machine.describe()
    bytes_per_second = copy_speed()
    title = f"{info['processor']}, {arguments.threads} threads, {info.get('kernels')}, torch {info['torch']}"
    lines = [
        title,
        f"commit {info['commit']}, copy {bytes_per_second / 1e9:.1f} GB/s, base {info.get('base_gemm')}",
    ]
    lines += [
        f"dropout {arguments.dropout}, r = {RANK}; PEFT, addmm_, ours: time / frozen F.linear + dX",
        "",
        HEADER,
    ]
    print("\n".join(lines))
    rows = []
    for dtype in dtypes:
        for shape in arguments.shapes:
            rows.append(bench(shape, dtype, arguments.dropout, arguments.rounds, bytes_per_second))
            lines.append(line(rows[-1]))
            print(lines[-1], flush=True)
    found = faults(rows, arguments.threads)
    lines.append(f"processor time / wall time, worst case: {busy(rows):.2f} of {arguments.threads} threads")
    print(lines[-1])
    lines += found
    out = arguments.out or RESULTS / f"linear-cpu-{arguments.threads}threads"
    result = {"machine": info, "copy_bytes_per_second": bytes_per_second, "rows": rows}
    write_json(out.with_suffix(".json"), result, indent=2)
    out.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    plot(rows, title, out.with_suffix(".png"))
    if found:
        raise SystemExit("\n".join(found))
