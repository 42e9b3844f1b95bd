"""The frozen layer without adapters: `x Wᵀ + b`, differentiable in x only."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..once_differentiable import once_differentiable
from .base_gemm import linear, linear_dx, serves
from .weight import FrozenWeight, FusedOperands


def frozen_linear(x: Tensor, frozen: FrozenWeight, bias: Tensor | None = None) -> Tensor:
    """Returns `x Wᵀ + b [..., O]` for x `[..., D]`; saves only the weight for backward."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    operands = frozen.fused(rows)
    plain_torch = operands is not None and (not serves(x) or torch.is_autocast_enabled("cpu"))
    if torch.compiler.is_compiling() or plain_torch:
        return F.linear(x, frozen.dense(), bias)
    if operands is None and torch.is_autocast_enabled(x.device.type):
        rows = rows.to(torch.get_autocast_dtype(x.device.type))
    if not (torch.is_grad_enabled() and x.requires_grad):
        y = _forward(rows, frozen, operands, bias)
    else:
        weight = None if operands is None else operands.weight
        y = _FrozenLinear.apply(rows, weight, bias, frozen, operands)
    return y.view(*x.shape[:-1], y.shape[-1])


def _forward(
    rows: Tensor, frozen: FrozenWeight, operands: FusedOperands | None, bias: Tensor | None
) -> Tensor:
    if operands is None:
        return frozen.matmul(rows, bias)
    return linear(rows, operands.weight, bias, operands.packed)


class _FrozenLinear(torch.autograd.Function):
    """Saves a plain weight as autograd saves tensors; other kinds are asked for `matmul_dx` in backward."""

    @staticmethod
    def forward(ctx: Any, rows, weight, bias, frozen, operands):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(weight)
        ctx.frozen, ctx.packed_dx = frozen, None if operands is None else operands.packed_dx
        return _forward(rows, frozen, operands, bias)

    @staticmethod
    @once_differentiable(lambda ctx: ())
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        (weight,) = ctx.saved_tensors
        dx = ctx.frozen.matmul_dx(dy) if weight is None else linear_dx(dy, weight, ctx.packed_dx)
        return dx, None, None, None, None
