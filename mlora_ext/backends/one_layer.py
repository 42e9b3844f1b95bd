"""Runs one layer by one compiled backend, below autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..frozen.plain import PlainWeight
from ..frozen.weight import FrozenWeight, FusedOperands
from . import cpu
from .calls import Gradients, PlanTensors, Wanted
from .gpu.operator import Batch, Into, Layer
from .selection import Backend, gpu_operator


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
            return cpu.forward(x, frozen, operands, bias, lora_a, lora_b, plan)
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
    into: Gradients | None = None,
) -> tuple[Tensor | None, Sequence[Tensor], Sequence[Tensor]]:
    """Returns `(dx, da, db)` as far as they are wanted; with `into`, dA and dB are added to it instead.

    `operands` is the weight as it was saved for this pass; None: `frozen` makes the product.
    """
    with torch._C._AutoDispatchBelowAutograd():
        if backend == "cpu":
            return cpu.backward(dy, x, frozen, operands, lora_a, lora_b, s, plan, wanted, into)
        held = frozen if operands is None else PlainWeight.of(operands.weight)
        layer, batch = Layer(held, None, lora_b), Batch(*plan)  # type: ignore[arg-type]
        sums = Into() if into is None else Into(into[0], [into[1]])
        operator = gpu_operator(backend)  # type: ignore[arg-type]
        dx, da, (db,) = operator.backward([dy], x, [layer], lora_a, s.unsqueeze(0), batch, wanted, sums)
        return dx, da, db
