"""The backend `cpu`: the compiled C++ kernels, with the frozen product inside of their call or before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..frozen.weight import FrozenWeight, FusedOperands
from .calls import Gradients, PlanTensors, Wanted


def forward(
    x: Tensor,
    frozen: FrozenWeight,
    operands: FusedOperands | None,
    bias: Tensor | None,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    plan: PlanTensors,
) -> tuple[Tensor, Tensor]:
    """Returns `(y, s)`: one call with a plain weight, two with any other."""
    if operands is not None:
        return torch.ops.mlora_ext.lora_linear.default(  # type: ignore[no-any-return]
            x, operands.weight, bias, lora_a, lora_b, *plan, operands.packed
        )
    y = frozen.matmul(x, bias)
    return y, torch.ops.mlora_ext.lora_add.default(x, y, lora_a, lora_b, *plan)


def backward(
    dy: Tensor,
    x: Tensor,
    frozen: FrozenWeight,
    operands: FusedOperands | None,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    s: Tensor,
    plan: PlanTensors,
    wanted: Wanted,
    into: Gradients | None,
) -> tuple[Tensor | None, Sequence[Tensor], Sequence[Tensor]]:
    """Returns `(dx, da, db)`; with `into`, dA and dB are added to it and returned empty."""
    dx: Tensor | None
    if operands is not None:
        dx, da, db = torch.ops.mlora_ext.lora_linear_backward.default(
            dy, x, operands.weight, lora_a, lora_b, s, *plan, *wanted, operands.packed_dx
        )
    else:
        dx = frozen.matmul_dx(dy) if wanted[0] else None
        da, db = torch.ops.mlora_ext.lora_add_backward.default(
            dy, x, dx, lora_a, lora_b, s, *plan, *wanted[1:]
        )
    if into is None:
        return dx, da, db
    torch._foreach_add_([*into[0], *into[1]], [*da, *db])
    return dx, [], []
