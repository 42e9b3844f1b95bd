"""The products `x Wᵀ + b` and `dy W` with a frozen weight, by the faster library.

On a CPU the compiled operators measure PyTorch's BLAS and oneDNN once per dtype, at the first call, and use
the faster one. Other devices and dtypes use PyTorch. The choice changes rounding, so a run that is resumed on
another machine sets its first choice again. Packed weights always use oneDNN, which is faster for them.
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
