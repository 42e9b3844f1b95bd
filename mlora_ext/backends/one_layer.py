"""Runs one layer by one compiled backend, below autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..frozen.plain import PlainWeight
from ..frozen.weight import FrozenWeight, FusedOperands
from .factors import Factors
from .gpu.operator import Batch, Layer
from .selection import Backend, gpu_operator

PLAN = ("segments", "scaling", "dropout_p", "dropout_rng", "layer")
"""Names of a plan's tensors, in the order of the operators' arguments; see docs/design.md."""
PlanTensors = tuple[Tensor | None, ...]
Wanted = tuple[bool, bool, bool]
"""Whether dx, dA and dB are wanted."""
Adapters = Sequence[Tensor] | Factors
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
) -> tuple[Tensor, Tensor]:
    """Returns `(y, s)` for x `[T, D]`; `operands` is `frozen.fused(x)`."""
    with torch._C._AutoDispatchBelowAutograd():
        if backend == "cpu":
            return cpu_forward(x, frozen, operands, bias, lora_a, lora_b, plan)
        operator = gpu_operator(backend)  # type: ignore[arg-type]
        (y,), s = operator.forward(x, [Layer(frozen, bias, lora_b)], lora_a, Batch(*plan))  # type: ignore[arg-type]
        return y, s[0]


def backward(
    backend: Backend,
    dy: Tensor,
    x: Tensor,
    frozen: FrozenWeight,
    operands: FusedOperands | None,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    s: Tensor,
    plan: PlanTensors,
    wanted: Wanted,
) -> tuple[Tensor | None, Sequence[Tensor], Sequence[Tensor]]:
    """Returns `(dx, da, db)` as far as they are wanted.

    `operands` is the weight as it was saved for this pass; None: `frozen` makes the product.
    """
    with torch._C._AutoDispatchBelowAutograd():
        if backend == "cpu":
            return cpu_backward(dy, x, frozen, operands, lora_a, lora_b, s, plan, wanted)
        held = frozen if operands is None else PlainWeight.of(operands.weight)
        layer, batch = Layer(held, None, lora_b), Batch(*plan)  # type: ignore[arg-type]
        operator = gpu_operator(backend)  # type: ignore[arg-type]
        dx, da, (db,) = operator.backward([dy], x, [layer], lora_a, s.unsqueeze(0), batch, wanted)
        return dx, da, db


def cpu_forward(
    x: Tensor,
    frozen: FrozenWeight,
    operands: FusedOperands | None,
    bias: Tensor | None,
    a: Adapters,
    b: Adapters,
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
    a: Adapters,
    b: Adapters,
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
