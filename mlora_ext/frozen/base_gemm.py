"""The products `x Wᵀ + b` and `dy W` by the library that was measured to be the fastest here.

On a CPU the compiled operators measure PyTorch's BLAS and oneDNN once per dtype, at the first call, and take
the faster one. Elsewhere, and for other dtypes, PyTorch's own is used. The choice changes rounding: a run
that is resumed on another machine sets the one that it began with. Products with a packed weight are always
oneDNN's, and faster.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..library import LOADED
from .rows import dense_rows

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """Returns `x Wᵀ + b [T, O]`, without autograd.

    Args:
        x: `[T, D]`.
        weight: `[O, D]`, dtype of x.
        bias: `[O]` or None.
        packed: the weight in oneDNN's layout for this product, or None.
    """
    if serves(x):
        return torch.ops.mlora_ext.base_linear(dense_rows(x), weight, bias, packed)
    return F.linear(x, weight, bias)


def linear_dx(dy: Tensor, weight: Tensor, packed: Tensor | None = None) -> Tensor:
    """Returns `dy W [T, D]`, without autograd.

    Args:
        dy: `[T, O]`.
        weight: `[O, D]`, dtype of dy.
        packed: the weight in oneDNN's layout for this product, or None.
    """
    if serves(dy):
        return torch.ops.mlora_ext.base_linear_dx(dense_rows(dy), weight, packed)
    return dy @ weight


def serves(x: Tensor) -> bool:
    """Whether the compiled library multiplies such an x."""
    return LOADED and x.device.type == "cpu" and x.dtype in _DTYPES


def base_gemm_of(dtype: torch.dtype) -> dict[str, str]:
    """Returns the library for a dtype on a CPU, as `{"float32": "onednn"}`; empty without a choice."""
    if not LOADED or dtype not in _DTYPES:
        return {}
    return {str(dtype).removeprefix("torch."): torch.ops.mlora_ext.base_gemm(dtype)}


def set_base_gemm(choices: Mapping[str, str]) -> None:
    """Sets what `base_gemm_of` gave, in place of a measurement.

    Args:
        choices: `aten` or `onednn` by name of dtype.

    Raises:
        ValueError: a name is unknown, or this build cannot serve the choice.
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
