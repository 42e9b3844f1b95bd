"""The frozen GEMM `x Wᵀ + b` and its `dy W`, by the library that was measured to be the fastest here.

On the CPU the compiled operators choose once per dtype between PyTorch's BLAS and oneDNN, at the first call.
Elsewhere, and for other dtypes, PyTorch's own. The choice changes rounding: a run that is resumed on another
machine sets the one that it began with. A weight that is packed once is multiplied by oneDNN, and faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _ops

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PackedWeight:
    """A frozen weight in oneDNN's own layouts, for `x Wᵀ` and for `dy W`: twice its memory, beside it.

    Follows its weight by its version, as autograd does: new numbers, strides or another dtype are packed when
    they are used next. In-place changes through `.data` count no version and are not seen. A copy, or what is
    unpickled, packs anew.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._source: Tensor | None = None  # kept, so that its address is not used again
        self._pair = _ops.NOT_PACKED

    def of(self, weight: Tensor) -> _ops.Packed:
        """The packed weight and its transpose, or none of both where oneDNN does not serve this weight.

        Args:
            weight: `[O, D]`.
        """
        if weight.is_inference():
            return _ops.NOT_PACKED
        key = (weight.data_ptr(), weight._version, weight.dtype, weight.device, weight.shape, weight.stride())
        if key != self._key:
            self._pair = _pack(weight) if packs(weight) else _ops.NOT_PACKED
            self._key, self._source = key, weight.detach()
        return self._pair

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return PackedWeight, ()


def packs(weight: Tensor) -> bool:
    """Whether oneDNN multiplies by weights of this dtype, on this device, with this torch and processor.

    Those made in inference mode are left out: they count no versions, so nobody would see that they changed.
    """
    if (
        weight.is_inference()
        or not _ops.LOADED
        or weight.device.type != "cpu"
        or not torch.backends.mkldnn.is_available()
    ):
        return False
    bf16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bf16 or weight.dtype == torch.float32


@torch.no_grad()
def _pack(weight: Tensor) -> _ops.Packed:
    reorder = torch.ops.mkldnn._reorder_linear_weight
    return reorder(weight.detach()), reorder(weight.detach().t())


def frozen_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: PackedWeight | None = None
) -> Tensor:
    """`x Wᵀ + b` by the chosen library, differentiable in x only; keeps nothing but the weight for backward.

    Args:
        x: `[..., D]`.
        weight: `[O, D]`, frozen; may be a transposed view.
        bias: `[O]` or None, frozen.
        packed: of `weight`, or None.

    Returns:
        `[..., O]`.
    """
    if torch.compiler.is_compiling() or not _serves(x) or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    pair = _ops.NOT_PACKED if packed is None or weight.dtype != x.dtype else packed.of(weight)
    rows = x.reshape(-1, x.shape[-1])
    if not (torch.is_grad_enabled() and x.requires_grad):
        y = linear(rows, weight, bias, pair[0])
    else:
        y = _FrozenLinear.apply(rows, weight, bias, pair)
    return y.view(*x.shape[:-1], weight.shape[0])


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, packed: _ops.Packed) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.packed = packed[1]
        return linear(x, weight, bias, packed[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return linear_dx(dy, weight, ctx.packed), None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """`x Wᵀ + b`, without autograd.

    Args:
        x: `[T, D]`.
        weight: `[O, D]`, dtype of x.
        bias: `[O]` or None.
        packed: the first of `PackedWeight.of(weight)`, or None.

    Returns:
        `[T, O]`.
    """
    if _serves(x):
        return torch.ops.mlora_ext.base_linear(x, weight, bias, packed)
    return F.linear(x, weight, bias)


def linear_dx(dy: Tensor, weight: Tensor, packed: Tensor | None = None) -> Tensor:
    """`dy W`, without autograd.

    Args:
        dy: `[T, O]`.
        weight: `[O, D]`, dtype of dy.
        packed: the second of `PackedWeight.of(weight)`, or None.

    Returns:
        `[T, D]`.
    """
    if _serves(dy):
        return torch.ops.mlora_ext.base_linear_dx(dy, weight, packed)
    return dy @ weight


def chosen(dtype: torch.dtype) -> dict[str, str]:
    """The library chosen for a dtype on the CPU: `{"float32": "onednn"}`; empty where there is no choice."""
    if not _ops.LOADED or dtype not in _DTYPES:
        return {}
    return {str(dtype).removeprefix("torch."): torch.ops.mlora_ext.base_gemm(dtype)}


def choose(choices: Mapping[str, str]) -> None:
    """Take over what `chosen` gave, in place of a measurement.

    Args:
        choices: `aten` or `onednn` by name of dtype.

    Raises:
        ValueError: if a name is unknown, or this build cannot serve the choice.
    """
    for name, library in choices.items():
        dtype = getattr(torch, name, None)
        if dtype not in _DTYPES or not _ops.LOADED:
            raise ValueError(f"base_gemm: this build has no choice for dtype {name!r}")
        try:
            torch.ops.mlora_ext.set_base_gemm(dtype, library)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].removeprefix("name: ")
            raise ValueError(f"base_gemm: {library!r} for {name}: {reason}") from error


def _serves(x: Tensor) -> bool:
    return _ops.LOADED and x.device.type == "cpu" and x.dtype in _DTYPES
