"""The products `x Wᵀ + b` and `dy W` with a frozen weight, alone and differentiable, by the faster library.

On a CPU the compiled operators measure PyTorch's BLAS and oneDNN once per dtype, at the first call, and use
the faster one. Other devices and dtypes use PyTorch. The choice changes rounding, so a run that is resumed on
another machine sets its first choice again. Packed weights always use oneDNN, which is faster for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..library import LOADED
from ..once_differentiable import once_differentiable
from .weight import FrozenWeight, FusedOperands


def dense_rows(rows: Tensor) -> Tensor:
    """Returns rows `[T, D]`, copied if there are gaps between elements or, on a CPU, between 16-bit rows.

    Products of 16 bits pad their tiles. On processors with AMX, PyTorch's own `F.linear` then takes in a NaN
    beside rows of 88 columns in a wider tensor, where the next row's adapter may have put it.
    """
    dense = rows.stride(0) == rows.shape[1] or rows.device.type != "cpu" or rows.element_size() != 2
    if dense and rows.stride(1) == 1:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)  # `contiguous()` keeps a single row's stride


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """Returns `x Wᵀ + b` for x `[T, D]`, without autograd; `packed`: W in oneDNN's layout for `x Wᵀ`."""
    if serves(x):
        return torch.ops.mlora_ext.base_linear(dense_rows(x), weight, bias, packed)
    return F.linear(x, weight, bias)


def linear_dx(dy: Tensor, weight: Tensor, packed: Tensor | None = None) -> Tensor:
    """Returns `dy W` for dy `[T, O]`, without autograd; `packed`: W in oneDNN's layout for `dy W`."""
    if serves(dy):
        return torch.ops.mlora_ext.base_linear_dx(dense_rows(dy), weight, packed)
    return dy @ weight


def serves(x: Tensor) -> bool:
    """Whether the compiled library is there and multiplies x: a CPU tensor in fp32, bf16 or fp16."""
    return LOADED and x.device.type == "cpu" and x.dtype in _DTYPES


def base_gemm_of(dtype: torch.dtype) -> dict[str, str]:
    """Returns a dtype's library on a CPU, such as `{"float32": "onednn"}`; empty if there is no choice."""
    if not LOADED or dtype not in _DTYPES:
        return {}
    return {str(dtype).removeprefix("torch."): torch.ops.mlora_ext.base_gemm(dtype)}


def set_base_gemm(choices: Mapping[str, str]) -> None:
    """Sets libraries (`aten` or `onednn`) by dtype name, as `base_gemm_of` returned them, without measuring.

    Raises ValueError if a name is unknown or this build does not have the library.
    """
    for name, library in choices.items():
        dtype = getattr(torch, name, None)
        if dtype not in _DTYPES or not LOADED:
            raise ValueError(f"base_gemm: this build has no choice for dtype {name!r}")
        try:
            torch.ops.mlora_ext.set_base_gemm(dtype, library)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].removeprefix("name: ")
            raise ValueError(f"base_gemm: {library!r} for {name}: {reason}") from error


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
