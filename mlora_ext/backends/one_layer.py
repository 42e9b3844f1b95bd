"""Runs one layer by one compiled backend, below autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..frozen.weight import FrozenWeight, FusedOperands
from .factors import Factors, factors_of, one_dtype, own_gradients
from .interface import Adapters, Layer, PlanTensors, Saved, Wanted
from .selection import Backend, gpu_operator

Matrices = Sequence[Tensor] | Factors
"""All A or all B: a matrix per adapter, or their table."""
OPS = torch.ops.mlora_ext


def forward(
    backend: Backend,
    x: Tensor,
    frozen: FrozenWeight,
    operands: FusedOperands | None,
    bias: Tensor | None,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    plan: PlanTensors,
) -> tuple[Tensor, Saved]:
    """Returns y, and what backward needs, for x `[T, D]`; `operands` is `frozen.fused(x)`."""
    with torch._C._AutoDispatchBelowAutograd():
        if backend == "cpu":
            y, s = cpu_forward(x, frozen, operands, bias, lora_a, lora_b, plan)
            return y, (s,)
        layer = Layer(frozen, None if operands is None else operands.weight, bias)
        (y,), saved = forward_of(backend, x, [layer], lora_a, [lora_b], plan)
        return y, saved


def backward(
    backend: Backend,
    dy: Tensor,
    x: Tensor,
    frozen: FrozenWeight,
    operands: FusedOperands | None,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    saved: Saved,
    plan: PlanTensors,
    wanted: Wanted,
) -> tuple[Tensor | None, Sequence[Tensor], Sequence[Tensor]]:
    """Returns `(dx, da, db)` as far as they are wanted.

    `operands` is the weight as it was saved for this pass; None: `frozen` makes the product.
    """
    with torch._C._AutoDispatchBelowAutograd():
        if backend == "cpu":
            return cpu_backward(dy, x, frozen, operands, lora_a, lora_b, saved[0], plan, wanted)
        layer = Layer(frozen, None if operands is None else operands.weight)
        dx, da, (db,) = backward_of(backend, [dy], x, [layer], lora_a, [lora_b], saved, plan, wanted)
        return dx, da, db


def forward_of(
    backend: Backend,
    x: Tensor,
    layers: Sequence[Layer],
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Sequence[Tensor]],
    plan: PlanTensors,
    masks: bool = True,
) -> tuple[list[Tensor], Saved]:
    """Returns y of layers that share x, and what backward needs, by a GPU backend.

    `lora_a` holds A of all adapters of the first layer, then of the second, and so on; `lora_b` B by layer;
    `masks` as in `GpuOperator.forward`.
    """
    if not lora_a:
        ys = [layer.frozen.matmul(x, layer.bias) for layer in layers]
        return ys, (x.new_empty(len(layers), len(x), 0),)
    segments = plan[0]
    if segments is not None and segments.device != x.device:
        raise ValueError(f"segments: expected device {x.device} (that of x), got {segments.device}")
    operator = gpu_operator(backend)  # type: ignore[arg-type]
    return operator.forward(x, layers, _adapters(lora_a, lora_b), plan, masks)


def backward_of(
    backend: Backend,
    dys: Sequence[Tensor],
    x: Tensor,
    layers: Sequence[Layer],
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Sequence[Tensor]],
    saved: Saved,
    plan: PlanTensors,
    wanted: Wanted,
) -> tuple[Tensor | None, list[Tensor], list[list[Tensor]]]:
    """Returns dx, dA in the order of `lora_a`, and dB by layer, as far as they are wanted."""
    if not lora_a:
        dx = x.new_zeros(x.shape) if wanted[0] else None
        for dy, layer in zip(dys, layers, strict=True):
            if dx is not None:
                layer.frozen.add_matmul_dx(dx, dy)
        return dx, [], [[] for _ in layers]
    a, b = _adapters(lora_a, lora_b)
    da: list[Tensor] = []
    db: list[Tensor] = []
    if wanted[1]:
        a, da = a.new_gradients()
    if wanted[2]:
        b, db = b.new_gradients()
    operator = gpu_operator(backend)  # type: ignore[arg-type]
    dx = operator.backward(dys, x, layers, Adapters(a, b), saved, plan, wanted)
    da = own_gradients(lora_a, da) if da else da
    db = own_gradients([matrix for some in lora_b for matrix in some], db) if db else db
    each = len(db) // len(layers)
    return dx, da, [db[i * each : (i + 1) * each] for i in range(len(layers))]


def _adapters(lora_a: Sequence[Tensor], lora_b: Sequence[Sequence[Tensor]]) -> Adapters:
    every_b = [matrix for some in lora_b for matrix in some]
    return Adapters(
        factors_of(one_dtype(lora_a), transposed=False), factors_of(one_dtype(every_b), transposed=True)
    )


def cpu_forward(
    x: Tensor,
    frozen: FrozenWeight,
    operands: FusedOperands | None,
    bias: Tensor | None,
    a: Matrices,
    b: Matrices,
    plan: PlanTensors,
) -> tuple[Tensor, Tensor]:
    """Returns `(y, s)` by the compiled CPU kernels, below autograd."""
    if operands is None:
        y = frozen.matmul(x, bias)
        if isinstance(a, Factors) and isinstance(b, Factors):
            return y, OPS.lora_add.table(x, y, a.first, a.table, b.first, b.table, *plan)
        return y, OPS.lora_add.default(x, y, a, b, *plan)
    weight, packed, _ = operands
    if isinstance(a, Factors) and isinstance(b, Factors):
        return OPS.lora_linear.table(  # type: ignore[no-any-return]
            x, weight, bias, packed, a.first, a.table, b.first, b.table, *plan
        )
    return OPS.lora_linear.default(x, weight, bias, a, b, *plan, packed)  # type: ignore[no-any-return]


def cpu_backward(
    dy: Tensor,
    x: Tensor,
    frozen: FrozenWeight,
    operands: FusedOperands | None,
    a: Matrices,
    b: Matrices,
    s: Tensor,
    plan: PlanTensors,
    wanted: Wanted,
) -> tuple[Tensor | None, Sequence[Tensor], Sequence[Tensor]]:
    """Returns `(dx, da, db)`, below autograd; tables of adapters get their gradients in place."""
    dx: Tensor | None
    tables: tuple[Tensor, ...] = ()
    if isinstance(a, Factors) and isinstance(b, Factors):
        assert a.into is not None
        assert b.into is not None
        tables = a.first, a.table, a.into[0], b.first, b.table, b.into[0]
    if operands is None:
        dx = frozen.matmul_dx(dy) if wanted[0] else None
        if tables:
            OPS.lora_add_backward.table(dy, x, dx, *tables, s, *plan)
            return dx, (), ()
        return dx, *OPS.lora_add_backward.default(dy, x, dx, a, b, s, *plan, *wanted[1:])
    weight, _, packed = operands
    if tables:
        dx = OPS.lora_linear_backward.table(dy, x, weight, packed, *tables, s, *plan, wanted[0])
        return dx, (), ()
    return OPS.lora_linear_backward.default(  # type: ignore[no-any-return]
        dy, x, weight, a, b, s, *plan, *wanted, packed
    )
