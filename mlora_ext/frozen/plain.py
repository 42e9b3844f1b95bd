"""The frozen GEMM `x Wᵀ + b` and its `dy W`, by the library that was measured to be the fastest here.

On a CPU the compiled operators measure PyTorch's BLAS and oneDNN once per dtype, at the first call, and take
the faster one. Elsewhere, and for other dtypes, PyTorch's own is used. The choice changes rounding: a run
that is resumed on another machine sets the one that it began with. Products with a packed weight are always
oneDNN's, and faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..ops import library as _ops

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (Tensor, nn.Parameter)  # no fake ones, whose numbers nobody can pack


class PackedWeight:
    """A frozen weight in oneDNN's own layouts, for `x Wᵀ` and for `dy W`: about twice its memory, beside it.

    Follows its weight by its version, as autograd does: new numbers, strides or another dtype are packed when
    they are used next. Writes through `.data`, `.detach()` or numpy count no version and are not seen. A
    copy, or what is unpickled, packs anew.
    """

    def __init__(self) -> None:
        # what was packed: as a key, and as a tensor that keeps its address from being used again; the pair
        self._state: tuple[tuple[Any, ...], Tensor | None, _ops.Packed] = ((), None, _ops.NOT_PACKED)

    def of(self, weight: Tensor) -> _ops.Packed:
        """The packed weight and its transpose, or none of both where oneDNN does not serve this weight.

        Args:
            weight: `[O, D]`.
        """
        if type(weight) not in _PLAIN or weight.is_inference():
            return _ops.NOT_PACKED
        key = (weight.data_ptr(), weight._version, weight.dtype, weight.device, weight.shape, weight.stride())
        state = self._state
        if key != state[0]:
            pair = _pack(weight) if packs(weight) else _ops.NOT_PACKED
            self._state = state = (key, weight.detach(), pair)
        return state[2]

    @property
    def nbytes(self) -> int:
        """Bytes that the packed tensors take; oneDNN pads them."""
        return sum(torch.ops.mkldnn._nbytes(tensor) for tensor in self._state[2] if tensor is not None)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return PackedWeight, ()


def packs(weight: Tensor) -> bool:
    """Whether oneDNN multiplies by such a weight, with this torch and processor.

    Not by those made in inference mode, which count no versions, so that nobody would see that they changed.
    """
    if type(weight) not in _PLAIN or weight.device.type != "cpu" or not weight.numel() or not _ops.LOADED:
        return False
    if weight.is_inference() or not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    bf16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bf16 or weight.dtype == torch.float32


@torch.no_grad()
def _pack(weight: Tensor) -> _ops.Packed:
    reorder = torch.ops.mkldnn._reorder_linear_weight
    return reorder(weight.detach()), reorder(weight.detach().t())


def packed_pair(x: Tensor, weight: Tensor, packed: PackedWeight | None) -> _ops.Packed:
    """`packed.of(weight)` where x is multiplied by this very weight, in eager mode."""
    if packed is None or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return _ops.NOT_PACKED
    if type(x) not in _PLAIN or x.dtype != weight.dtype:
        return _ops.NOT_PACKED
    return packed.of(weight)


def frozen_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: PackedWeight | None = None
) -> Tensor:
    """`x Wᵀ + b` by the chosen library, differentiable in x only; keeps only the weight for backward.

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
    pair = packed_pair(x, weight, packed)
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
        return torch.ops.mlora_ext.base_linear(_ops.dense_rows(x), weight, bias, packed)
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
        return torch.ops.mlora_ext.base_linear_dx(_ops.dense_rows(dy), weight, packed)
    return dy @ weight


def base_gemm_of(dtype: torch.dtype) -> dict[str, str]:
    """The library for a dtype on the CPU, as `{"float32": "onednn"}`; empty where there is no choice."""
    if not _ops.LOADED or dtype not in _DTYPES:
        return {}
    return {str(dtype).removeprefix("torch."): torch.ops.mlora_ext.base_gemm(dtype)}


def set_base_gemm(choices: Mapping[str, str]) -> None:
    """Take over what `base_gemm_of` gave, in place of a measurement.

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
