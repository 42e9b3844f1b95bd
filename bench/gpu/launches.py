"""Time of every CUDA launch of a layer with adapters, on the GPU that is there, by PyTorch's profiler.

    python bench/gpu_launches.py
    python bench/gpu_launches.py --rows 2048 --out gpu-launches

A row is a kernel: mean microseconds of a call, and calls in a forward and backward pass of the layer. Rows,
weights and gradients are bf16, adapters fp32. Beside them stand the frozen products alone and a copy of x, by
events. `bench/gpu_budget.py` says what the launches should take.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from shared import machine
from shared.command_line import documented_parser
from shared.results import RESULTS
from torch.profiler import ProfilerActivity, profile

import mlora_ext as mx
from mlora_ext.backends.selection import gpu_operator

CASES: list[tuple[int, int, list[int], float]] = [
    (4096, 4096, [16] * 4, 0.1),
    (4096, 4096, [16] * 4, 0.0),
    (4096, 4096, [64] * 4, 0.1),
    (4096, 4096, [8, 16, 32, 64] * 4, 0.1),
    (4096, 11008, [16] * 4, 0.1),
    (11008, 4096, [16] * 4, 0.1),
]
"""d_in, d_out, the adapters' ranks, dropout."""
PASSES = 10


def layer(d_in: int, d_out: int, ranks: list[int], p: float, rows: int) -> Callable[[], None]:
    """Returns a forward and backward pass of one layer whose adapters have equally many rows."""
    half = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(rows, d_in, **half).requires_grad_()
    dy, weight = torch.randn(rows, d_out, **half), torch.randn(d_out, d_in, **half)
    a = [torch.randn(rank, d_in, device="cuda", requires_grad=True) for rank in ranks]
    b = [torch.randn(d_out, rank, device="cuda", requires_grad=True) for rank in ranks]
    layout = mx.SegmentLayout.from_lengths([rows // len(ranks)] * len(ranks))
    dropout = mx.LoRADropout([p] * len(ranks), list(range(len(ranks)))) if p else None

    def run() -> None:
        y = mx.multi_lora_linear(x, weight, None, a, b, [1.0] * len(ranks), layout, dropout)
        torch.autograd.grad(y, [x, *a, *b], dy)

    return run


def kernels(run: Callable[[], None]) -> Iterator[str]:
    """Yields a line of each kernel, those that take longest first."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PASSES):
            run()
        torch.cuda.synchronize()
    events = [event for event in found.key_averages() if event.self_device_time_total]
    for event in sorted(events, key=lambda event: -event.self_device_time_total):
        name = re.sub(r"mlora::cuda::|\(anonymous namespace\)::|^void |\(.*", "", event.key)
        each, calls = event.self_device_time_total / event.count, event.count / PASSES
        yield f"  {each:8.1f} x {calls:4.1f}  {name[:90]}"


def microseconds(run: Callable[[], object]) -> float:
    """Mean of 20 calls one after the other."""
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 20 * 1000


def case(d_in: int, d_out: int, ranks: list[int], p: float, rows: int) -> Iterator[str]:
    """Yields the lines of one layer."""
    mean = f"{len(ranks)} adapters of ranks {'/'.join(map(str, dict.fromkeys(ranks)))}"
    yield f"{d_in} -> {d_out}, {rows} rows, {mean}, dropout {p}: µs a call x calls"
    yield from kernels(layer(d_in, d_out, ranks, p, rows))
    half = {"device": "cuda", "dtype": torch.bfloat16}
    x, weight = torch.randn(rows, d_in, **half), torch.randn(d_out, d_in, **half)
    dy = torch.randn(rows, d_out, **half)
    yield (
        f"  frozen products alone {microseconds(lambda: x @ weight.t()):.1f} and "
        f"{microseconds(lambda: dy @ weight):.1f}, a copy of x {microseconds(x.clone):.1f}"
    )


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--rows", type=int, default=8192, help="of a batch, over all adapters")
    parser.add_argument("--out", help="name in results/")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, f"{parser.prog}: this torch sees no CUDA device\n")
    gpu_operator("cuda")
    lines = [", ".join(f"{key} {value}" for key, value in machine.describe().items()), ""]
    print("\n".join(lines))
    for shape in CASES:
        found = [*case(*shape, arguments.rows), ""]
        print("\n".join(found), flush=True)
        lines += found
    if arguments.out:
        (RESULTS / Path(arguments.out).name).with_suffix(".txt").write_text("\n".join(lines))
