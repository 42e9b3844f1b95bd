"""Forward and backward of each GPU backend on small, odd shapes: for `compute-sanitizer`, and by itself.

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m bench gpu-sanitize --backend cuda
    python -m bench gpu-sanitize --device cpu

Results are compared with the reference in fp64, so that a run in which nothing was launched, or in which the
sanitizer changed something, does not pass. Exits with 1 where a result is wrong or no backend was there.
"""

from __future__ import annotations

import argparse
from itertools import product

import torch
from linear.oracle import ALLOWED, errors
from torch import Tensor

import mlora_ext as mx
from mlora_ext.backends import run as run_layers
from mlora_ext.backends.gpu_base_gemm import Library, serves
from mlora_ext.backends.interface import Layer
from mlora_ext.frozen.plain import PlainWeight

BACKENDS = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}
Shape = tuple[list[int], list[int], list[int], int, int]
SHAPES: list[Shape] = [
    # rows of each segment, its adapter, ranks, d_in, d_out
    ([67, 0, 1, 64, 3], [1, 0, 2, 0, -1], [1, 8, 17], 72, 40),
    ([130, 5], [0, 1], [64, 33], 40, 136),
]


def results(shape: Shape, dtype: torch.dtype, p: float, inputs: list[Tensor]) -> list[Tensor]:
    """y, dx and the adapters' gradients, by the backend that is in use."""
    lengths, order, ranks, _, _ = shape
    x, dy, weight, bias, *adapters = (tensor.to(dtype) for tensor in inputs)
    for tensor in (x, *adapters):
        tensor.requires_grad_()
    lora_a, lora_b = adapters[: len(ranks)], adapters[len(ranks) :]
    layout = mx.SegmentLayout.from_lengths(lengths, order)
    dropout = mx.LoRADropout(p=[p] * len(ranks), seeds=list(range(len(ranks)))) if p else None
    scaling = [0.5 + index for index in range(len(ranks))]
    y = mx.multi_lora_linear(x, weight, bias, lora_a, lora_b, scaling, layout, dropout)
    return [y.detach(), *torch.autograd.grad(y, [x, *adapters], dy)]


def shared_results(dtype: torch.dtype, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Two layers that share x, in one call of `cuda` and alone: s and gradients, which must be equal."""
    ranks, widths, d_in = [5, 16, 100], (40, 56), 72
    layout = mx.SegmentLayout.from_lengths([37, 9, 1061], [0, -1, 2])
    x = torch.randn(1107, d_in, device=device).to(dtype)
    dys = [torch.randn(1107, d_out, device=device).to(dtype) for d_out in widths]
    weights = [torch.zeros(d_out, d_in, dtype=dtype, device=device) for d_out in widths]
    layers = [Layer(PlainWeight.of(weight), weight) for weight in weights]
    b = [[torch.randn(d_out, rank, device=device).to(dtype) for rank in ranks] for d_out in widths]
    a = [[torch.randn(rank, d_in, device=device).to(dtype) for rank in ranks] for _ in widths]
    drop = mx.LoRADropout([0.1] * 3, [1, 2, 3]).tensors(device)
    table, scaling = layout.table(device), torch.ones(3, device=device)

    def run(which: list[int]) -> list[Tensor]:
        plan = (table, scaling, drop[0], drop[1], torch.tensor(which, device=device))
        some, lora_a, lora_b = (
            [layers[i] for i in which],
            [m for i in which for m in a[i]],
            [m for i in which for m in b[i]],
        )
        _, saved = run_layers.forward("cuda", x, some, lora_a, lora_b, plan)
        _, da, db = run_layers.backward(
            "cuda", [dys[i] for i in which], x, some, lora_a, lora_b, saved, plan, (True, True, True)
        )
        return [*da, *db, saved[0]]

    with torch.no_grad():
        together, first, second = run([0, 1]), run([0]), run([1])
    n = len(ranks)
    alone = [
        *first[:n],
        *second[:n],
        *first[n : 2 * n],
        *second[n : 2 * n],
        torch.cat([first[-1], second[-1]]),
    ]
    return together, alone


def random_inputs(shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    """x, dy, W, b, the A and the B, in fp64 but with values that the dtype has."""
    lengths, _, ranks, d_in, d_out = shape
    rows = sum(lengths)
    sizes = [(rows, d_in), (rows, d_out), (d_out, d_in), (d_out,)]
    sizes += [(rank, d_in) for rank in ranks] + [(d_out, rank) for rank in ranks]
    return [torch.randn(size, device=device).div(8).to(dtype).double() for size in sizes]


def wrong(found: list[Tensor], exact: list[Tensor], allowed: float) -> list[str]:
    """What is not as the oracle has it."""
    return [
        f"result {index}: relative error {error:.2e}, allowed {allowed:.0e}"
        for index, error in enumerate(errors(found, exact).tolist())
        if not error <= allowed
    ]


def libraries(backend: str, dtype: torch.dtype) -> list[Library | None]:
    """Who may make the frozen products; None: there is no choice."""
    own = backend == "cuda" and dtype.itemsize == 2 and serves(torch.device("cuda"))
    return ["cublas", "mlora"] if own else [None]


def main() -> int:
    """Run every backend that this build has; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=BACKENDS, default="cuda")
    parser.add_argument("--backend", choices=[name for names in BACKENDS.values() for name in names])
    options = parser.parse_args()
    device, ran, failed = options.device, 0, 0
    for backend in [options.backend] if options.backend else BACKENDS[device]:
        try:
            mx.use_backend(backend)  # type: ignore[arg-type]
        except ValueError as error:
            print(f"{backend}: not checked: {error}")
            continue
        for shape, dtype, p in product(SHAPES, ALLOWED, (0.0, 0.1)):
            inputs = random_inputs(shape, dtype, device)
            with mx.use_backend("reference"):
                exact = results(shape, torch.float64, p, inputs)
            for library in libraries(backend, dtype):
                with mx.use_backend(backend):  # type: ignore[arg-type]
                    if library:
                        mx.use_gpu_base_gemm(library)
                    faults = wrong(results(shape, dtype, p, inputs), exact, ALLOWED[dtype])
                ran += 1
                failed += bool(faults)
                for fault in faults or ["right"]:
                    how = ", ".join(filter(None, (backend, library)))
                    print(f"{how}, {dtype}, p={p}, {shape[0]} rows: {fault}", flush=True)
        for dtype in ALLOWED if backend == "cuda" else ():
            together, alone = shared_results(dtype, device)
            same = all(map(torch.equal, together, alone))
            ran, failed = ran + 1, failed + (not same)
            print(f"{backend}, {dtype}, layers that share x: {'right' if same else 'other bits'}", flush=True)
    print(f"{ran} cases, {failed} wrong")
    if not ran:
        print("nothing was checked: no backend of this build serves the device")
    return 0 if ran and not failed else 1
