"""Runs layers that share x by one compiled backend, below autograd: the one way to the kernels in eager mode.

A backend for GPUs takes several layers in one call, that of a CPU one. Adapters come as tables of addresses,
to whose gradients backward adds, or as matrices, of which it returns new gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .factors import Factors, factors_of, one_dtype, own_gradients
from .interface import Adapters, Layer, PlanTensors, Saved, Wanted
from .selection import Backend, gpu_operator

Matrices = Sequence[Tensor] | Factors
"""All A or all B, layer after layer: a matrix per adapter, or their table."""
OPS = torch.ops.mlora_ext


def forward(
    backend: Backend,
    x: Tensor,
    layers: Sequence[Layer],
    a: Matrices,
    b: Matrices,
    plan: PlanTensors,
    masks: bool = True,
) -> tuple[list[Tensor], Saved]:
    """Returns `y [T, O]` of each layer for x `[T, D]`, and what backward needs.

    `masks` as in `GpuOperator.forward`.
    """
    if backend != "cpu":
        if isinstance(a, Factors) and isinstance(b, Factors):
            return gpu_operator(backend).forward(x, layers, Adapters(a, b), plan, masks)  # type: ignore[arg-type]
        return _forward_of_matrices(backend, x, layers, a, b, plan, masks)  # type: ignore[arg-type]
    ((frozen, weight, bias, packed),) = layers
    if isinstance(a, Factors) and isinstance(b, Factors):
        if weight is None:  # the frozen weight makes its own product, and the kernel adds to that
            y = frozen.matmul(x, bias)
            return [y], (OPS.lora_add.table(x, y, a.first, a.table, b.first, b.table, *plan),)
        y, s = OPS.lora_linear.table(x, weight, bias, packed, a.first, a.table, b.first, b.table, *plan)
        return [y], (s,)
    # Without this guard the calls would pass the formula for compiled graphs, which is slow Python.
    with torch._C._AutoDispatchBelowAutograd():
        if weight is None:
            y = frozen.matmul(x, bias)
            return [y], (OPS.lora_add.default(x, y, a, b, *plan),)
        y, s = OPS.lora_linear.default(x, weight, bias, a, b, *plan, packed)
        return [y], (s,)


def backward(
    backend: Backend,
    dys: Sequence[Tensor],
    x: Tensor,
    layers: Sequence[Layer],
    a: Matrices,
    b: Matrices,
    saved: Saved,
    plan: PlanTensors,
    wanted: Wanted,
) -> tuple[Tensor | None, Sequence[Tensor], Sequence[Tensor]]:
    """Returns dx, and dA and dB in the order of the matrices, as far as they are wanted.

    Tables get their gradients in place: dA and dB are empty then. A layer's `packed` is that for `dy W`.
    """
    dx: Tensor | None
    if backend != "cpu":
        if isinstance(a, Factors) and isinstance(b, Factors):
            operator = gpu_operator(backend)  # type: ignore[arg-type]
            return operator.backward(dys, x, layers, Adapters(a, b), saved, plan, wanted), (), ()
        return _backward_of_matrices(backend, dys, x, layers, a, b, saved, plan, wanted)  # type: ignore[arg-type]
    ((frozen, weight, _, packed),), (dy,), (s,) = layers, dys, saved
    if isinstance(a, Factors) and isinstance(b, Factors):
        assert a.into is not None
        assert b.into is not None
        tables = a.first, a.table, a.into[0], b.first, b.table, b.into[0]
        if weight is None:
            dx = frozen.matmul_dx(dy) if wanted[0] else None
            OPS.lora_add_backward.table(dy, x, dx, *tables, s, *plan)
        else:
            dx = OPS.lora_linear_backward.table(dy, x, weight, packed, *tables, s, *plan, wanted[0])
        return dx, (), ()
    with torch._C._AutoDispatchBelowAutograd():
        if weight is None:
            dx = frozen.matmul_dx(dy) if wanted[0] else None
            return dx, *OPS.lora_add_backward.default(dy, x, dx, a, b, s, *plan, *wanted[1:])
        return OPS.lora_linear_backward.default(  # type: ignore[no-any-return]
            dy, x, weight, a, b, s, *plan, *wanted, packed
        )


def _forward_of_matrices(
    backend: Backend,
    x: Tensor,
    layers: Sequence[Layer],
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    plan: PlanTensors,
    masks: bool,
) -> tuple[list[Tensor], Saved]:
    if not lora_a:
        ys = [layer.frozen.matmul(x, layer.bias) for layer in layers]
        return ys, (x.new_empty(len(layers), len(x), 0),)
    segments = plan[0]
    if segments is not None and segments.device != x.device:
        raise ValueError(f"segments: expected device {x.device} (that of x), got {segments.device}")
    operator = gpu_operator(backend)  # type: ignore[arg-type]
    with torch._C._AutoDispatchBelowAutograd():
        return operator.forward(x, layers, _tables(lora_a, lora_b), plan, masks)


def _backward_of_matrices(
    backend: Backend,
    dys: Sequence[Tensor],
    x: Tensor,
    layers: Sequence[Layer],
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    saved: Saved,
    plan: PlanTensors,
    wanted: Wanted,
) -> tuple[Tensor | None, Sequence[Tensor], Sequence[Tensor]]:
    if not lora_a:
        dx = x.new_zeros(x.shape) if wanted[0] else None
        for dy, layer in zip(dys, layers, strict=True):
            if dx is not None:
                layer.frozen.add_matmul_dx(dx, dy)
        return dx, [], []
    with torch._C._AutoDispatchBelowAutograd():
        a, b = _tables(lora_a, lora_b)
        da: list[Tensor] = []
        db: list[Tensor] = []
        if wanted[1]:
            a, da = a.new_gradients()
        if wanted[2]:
            b, db = b.new_gradients()
        operator = gpu_operator(backend)  # type: ignore[arg-type]
        dx = operator.backward(dys, x, layers, Adapters(a, b), saved, plan, wanted)
        return dx, own_gradients(lora_a, da) if da else da, own_gradients(lora_b, db) if db else db


def _tables(lora_a: Sequence[Tensor], lora_b: Sequence[Tensor]) -> Adapters:
    return Adapters(
        factors_of(one_dtype(lora_a), transposed=False), factors_of(one_dtype(lora_b), transposed=True)
    )
