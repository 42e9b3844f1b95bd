"""Runs one layer by one compiled backend, below autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..frozen.plain import PlainWeight
from ..frozen.weight import FrozenWeight, FusedOperands
from .gpu.operator import Batch, Into, Layer
from .selection import Backend, gpu_operator

PLAN = ("segments", "scaling", "dropout_p", "dropout_rng", "layer")
"""Names of a plan's tensors, in the order of the operators' arguments; see docs/design.md."""
PlanTensors = tuple[Tensor | None, ...]
Wanted = tuple[bool, bool, bool]
"""Whether dx, dA and dB are wanted."""
Gradients = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Gradients of lora_a and of lora_b."""


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
        if backend == "cpu" and operands is not None:
            return torch.ops.mlora_ext.lora_linear.default(  # type: ignore[no-any-return]
                x, operands.weight, bias, lora_a, lora_b, *plan, operands.packed
            )
        if backend == "cpu":
            y = frozen.matmul(x, bias)
            return y, torch.ops.mlora_ext.lora_add.default(x, y, lora_a, lora_b, *plan)
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
        held = frozen if operands is None else PlainWeight.of(operands.weight)
        layer, batch = Layer(held, None, lora_b), Batch(*plan)  # type: ignore[arg-type]
        sums = Into() if into is None else Into(into[0], [into[1]])
        operator = gpu_operator(backend)  # type: ignore[arg-type]
        dx, da, (db,) = operator.backward([dy], x, [layer], lora_a, s.unsqueeze(0), batch, wanted, sums)
        return dx, da, db
