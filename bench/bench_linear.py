"""One linear layer with several adapters, forward and backward, against the same layer without adapters.

    python bench/bench_linear.py                                 # fp32 and bf16, five shapes, 2 threads
    python bench/bench_linear.py --dtype bfloat16 --shapes 512x1024x1024x8 --out linear

In one run, taking turns, medians: the frozen layer (`F.linear` and dX), the same by the library that
mlora_ext chose, PEFT's layers in a loop, a loop of `addmm_`, ours, and ours with the frozen weight packed
(`pack_base`: about three times its memory). First ours and the loops are checked against the fp64 oracle.
At its turn each runs twice. The second call counts: in training, a layer's code has just run for the layer
before. The first follows another contender, which has filled the caches with code and data of its own; its
ratio stands under "1st". "limit" is the least time for the low-rank part alone: its bytes at the speed of a
copy or its FLOPs at the speed of the chosen GEMM, whichever is longer.
Exits with 1, after results are written, where plain weights miss a "must" or something else used the
processors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import contenders
import machine
import torch
from contenders import Layer, Run

import mlora_ext as mx
from mlora_ext.gemm import PackedWeight

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


@dataclass
class Timing:
    """Median wall seconds of the first and second call of a turn; processor seconds per wall second."""

    first: float
    seconds: float
    processors: float


def take_turns(cases: dict[str, Run], layer: Layer, rounds: int, warm_up: int = 2) -> dict[str, Timing]:
    """Time every case twice in a row, once a round on the same fresh data, the order turning."""
    calls: dict[str, list[tuple[float, float, float]]] = {name: [] for name in cases}
    names = list(cases)
    for turn in range(warm_up + rounds):
        layer.refresh()
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            first, _ = timed(cases[name])
            wall, processor = timed(cases[name])
            if turn >= warm_up:
                calls[name].append((first, wall, processor))
    timings = {}
    for name, times in calls.items():
        first, wall, processor = zip(*times, strict=True)
        timings[name] = Timing(statistics.median(first), statistics.median(wall), sum(processor) / sum(wall))
    return timings


def timed(run: Run) -> tuple[float, float]:
    """Wall and processor seconds of one call, without freeing its results."""
    wall, processor = time.perf_counter(), time.process_time()
    results = run()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    del results
    return wall, processor


def error(results: list[torch.Tensor], oracle: list[torch.Tensor]) -> float:
    """Largest relative error of a result, in the Frobenius norm."""
    pairs = zip(results, oracle, strict=True)
    return max(float((a.detach().double() - b.detach()).norm() / b.detach().norm()) for a, b in pairs)


def check(dtype: torch.dtype) -> None:
    """Stop the benchmark when a contender computes something else than the oracle does.

    Raises:
        SystemExit: naming the contender and its error.
    """
    allowed = 1e-5 if dtype == torch.float32 else 2e-2
    for p in (0.0, 0.1):
        layer = Layer.random(96, 160, 224, 3, 8, dtype, p)
        double = [t.detach().double().requires_grad_() for t in (layer.x, *layer.lora_a, *layer.lora_b)]
        exact = Layer(double[0], layer.dy.double(), layer.weight.double(), double[1:4], double[4:], p)
        with mx.use_backend("reference"):
            oracle = contenders.ours(exact)()
        checked = {"ours": contenders.ours(layer), "ours, packed": contenders.ours(layer, PackedWeight())}
        if p == 0.0:  # torch draws other masks
            checked |= {"PEFT loop": contenders.peft_loop(layer), "addmm_ loop": contenders.addmm_loop(layer)}
        for name, run in checked.items():
            found = error(run(), oracle)
            if not found <= allowed:
                raise SystemExit(f"{name}, {dtype}, p={p}: relative error {found:.2e}, allowed {allowed:.0e}")


def copy_speed() -> float:
    """Bytes read and written per second by a copy that no cache holds."""
    source, target = torch.empty(2, 64 * 2**20).unbind()
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - begin)
    return 2 * source.nbytes / statistics.median(seconds)


def limit(shape: Shape, element: int, gemm_seconds: float, bytes_per_second: float) -> dict[str, float]:
    """Bytes and FLOPs of the low-rank part, and the least seconds for them (KERNELS: the limit)."""
    rows, d_in, d_out, _ = shape
    flops = 6.0 * rows * RANK * (d_in + d_out)
    # forward: x read, y read and written; backward: dy and x read, dx read and written
    moved = float(element * rows * (4 * d_in + 3 * d_out))
    flops_per_second = 4.0 * rows * d_in * d_out / gemm_seconds
    return {
        "flops": flops,
        "bytes": moved,
        "seconds": max(moved / bytes_per_second, flops / flops_per_second),
    }


def bench(shape: Shape, dtype: torch.dtype, p: float, rounds: int, bytes_per_second: float) -> dict[str, Any]:
    """One row of the table."""
    layer = Layer.random(*shape, RANK, dtype, p)
    cases = {
        "frozen": contenders.frozen(layer),
        "gemm": contenders.chosen_gemm(layer),
        "peft": contenders.peft_loop(layer),
        "addmm": contenders.addmm_loop(layer),
        "ours": contenders.ours(layer),
    }
    packed = PackedWeight()
    if packed.of(layer.weight)[0] is not None:
        cases["ours_packed"] = contenders.ours(layer, packed)
    if dtype != torch.float32:
        cases["ours_fp32_adapters"] = contenders.ours(layer.with_fp32_adapters())
    timings = take_turns(cases, layer, rounds)
    seconds = {name: timing.seconds for name, timing in timings.items()}
    name = str(dtype).removeprefix("torch.")
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
        "limit": limit(shape, layer.x.element_size(), seconds["gemm"], bytes_per_second),
        "processors": {key: timing.processors for key, timing in timings.items()},
    }


HEADER = (
    f"{'T x d_in x d_out, N':23} {'dtype':8} | {'frozen ms':>9} {'gemm ms':>8} {'ours ms':>8} | "
    f"{'PEFT':>5} {'addmm_':>6} {'ours':>5} {'packed':>6} {'must':>5} {'1st':>5} {'fp32 A,B':>8} | "
    f"{'ours/gemm':>9} {'added ms':>8} {'limit ms':>8} {'MB':>5} {'GFLOP':>5}"
)


def line(row: dict[str, Any]) -> str:
    """A row as text; ratios are to the frozen layer unless they say otherwise."""
    rows, d_in, d_out, adapters = row["shape"]
    ms = {name: 1e3 * value for name, value in row["seconds"].items()}
    ratio, least = row["ratio_to_frozen"], row["limit"]
    mixed = f"{ratio['ours_fp32_adapters']:8.3f}" if "ours_fp32_adapters" in ratio else f"{'':8}"
    packed = f"{ratio['ours_packed']:6.3f}" if "ours_packed" in ratio else f"{'':6}"
    must = f"{row['must']:5.2f}" if row["must"] else f"{'':5}"
    name = f"{rows} x {d_in} x {d_out}, {adapters}"
    return (
        f"{name:23} {row['dtype']:8} | {ms['frozen']:9.2f} {ms['gemm']:8.2f} "
        f"{ms['ours']:8.2f} | {ratio['peft']:5.2f} {ratio['addmm']:6.2f} {ratio['ours']:5.3f} "
        f"{packed} {must} {row['first_call_ratio_to_frozen']['ours']:5.3f} {mixed} | "
        f"{row['ours_to_gemm']:9.3f} {1e3 * row['added_seconds']:8.2f} {1e3 * least['seconds']:8.2f} "
        f"{least['bytes'] / 1e6:5.0f} {least['flops'] / 1e9:5.2f}"
    )


def busy(rows: list[dict[str, Any]]) -> float:
    """Processor seconds per wall second, worst case; PEFT's loop leaves processors idle by itself."""
    return min(value for row in rows for name, value in row["processors"].items() if name != "peft")


def faults(rows: list[dict[str, Any]], threads: int) -> list[str]:
    """Why these results do not show what they should; the processors idle where something else had them."""
    missed = [
        f"missed: {named(row)}, must be {row['must']:.2f}"
        for row in rows
        if row["must"] and row["ratio_to_frozen"]["ours"] > row["must"]
    ]
    disturbed = busy(rows) <= 0.9 * threads
    return missed + (["SOMETHING ELSE RAN: do not trust this"] if disturbed else [])


def ours(row: dict[str, Any]) -> dict[str, float]:
    """Our ratios to the frozen layer, without and with packed weights."""
    names = {"ours": "plain", "ours_packed": "packed"}
    return {
        label: row["ratio_to_frozen"][key] for key, label in names.items() if key in row["ratio_to_frozen"]
    }


def named(row: dict[str, Any]) -> str:
    """The row and its ratios in words."""
    ratios = ", ".join(f"{label} {ratio:.3f}" for label, ratio in ours(row).items())
    return f"{'x'.join(map(str, row['shape']))} {row['dtype']}: {ratios} of the frozen layer's time"


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Bars of the ratio to the frozen layer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = {
        "peft": "PEFT loop",
        "addmm": "addmm_ loop",
        "gemm": "chosen GEMM, no adapters",
        "ours": "ours",
        "ours_packed": "ours, packed weight",
    }
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure, panels = plt.subplots(len(dtypes), 1, figsize=(9, 3.2 * len(dtypes)), squeeze=False)
    for dtype, axes in zip(dtypes, panels[:, 0], strict=True):
        chosen = [row for row in rows if row["dtype"] == dtype]
        for index, (key, label) in enumerate(names.items()):
            places = [i + 0.16 * (index - 2) for i in range(len(chosen))]
            bars = axes.bar(places, [row["ratio_to_frozen"].get(key, 0) for row in chosen], 0.16, label=label)
            axes.bar_label(bars, fmt="%.2f", fontsize=6)
        for i, row in enumerate(chosen):
            if row["must"]:
                axes.plot([i + 0.08, i + 0.4], [row["must"]] * 2, color="black", linewidth=1)
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set_xticks(range(len(chosen)), ["x".join(map(str, row["shape"])) for row in chosen], fontsize=8)
        axes.set_ylabel(f"time / frozen F.linear, {dtype}")
    panels[0, 0].legend(fontsize=8)
    panels[0, 0].set_title(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


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
    out = arguments.out or machine.RESULTS / f"linear-cpu-{arguments.threads}threads"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    result = {"machine": info, "copy_bytes_per_second": bytes_per_second, "rows": rows}
    out.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    plot(rows, title, out.with_suffix(".png"))
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
