"""A frozen weight that is also kept in oneDNN's own layouts: faster, for about three times the memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..library import LOADED
from .base_gemm import linear, linear_dx
from .plain import PlainWeight
from .weight import FusedOperands

Pair = tuple[Tensor | None, Tensor | None]
"""Packed for `x Wᵀ` and for `dy W`."""
_NOT_PACKED: Pair = (None, None)
_PLAIN = (Tensor, nn.Parameter)  # no fake ones, whose numbers nobody can pack


class PackedCache:
    """What one weight was packed to; layers whose weights are tied share one.

    Follows the weight by its version, as autograd does: new numbers, strides or another dtype are packed when
    they are used next. Writes through `.data`, `.detach()` or numpy count no version and are not seen. A
    copy, or what is unpickled, packs anew.
    """

    def __init__(self) -> None:
        # what was packed: as a key, and as a tensor that keeps its address from being used again; the pair
        self._state: tuple[tuple[Any, ...], Tensor | None, Pair] = ((), None, _NOT_PACKED)

    def of(self, weight: Tensor) -> Pair:
        """Returns the packed weight and its transpose, or none of both where oneDNN does not serve it.

        Args:
            weight: `[O, D]`.
        """
        if type(weight) not in _PLAIN or weight.is_inference():
            return _NOT_PACKED
        key = (weight.data_ptr(), weight._version, weight.dtype, weight.device, weight.shape, weight.stride())
        state = self._state
        if key != state[0]:
            pair = _pack(weight) if packs(weight) else _NOT_PACKED
            self._state = state = (key, weight.detach(), pair)
        return state[2]

    @property
    def nbytes(self) -> int:
        """Bytes that the packed tensors take; oneDNN pads them."""
        return sum(torch.ops.mkldnn._nbytes(tensor) for tensor in self._state[2] if tensor is not None)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return PackedCache, ()


class PackedWeight(PlainWeight):
    """A layer's own `weight`, and oneDNN's copies of it, one for each direction.

    Args:
        layer: as `PlainWeight`'s.
        cache: of another layer with the same weight; default: one of its own.
    """

    def __init__(self, layer: nn.Module, cache: PackedCache | None = None) -> None:
        super().__init__(layer)
        self.cache = cache or PackedCache()

    @classmethod
    def of(cls, weight: Tensor, cache: PackedCache | None = None) -> PackedWeight:
        """A weight that belongs to no layer."""
        packed = cls.__new__(cls)
        packed._tensors, packed._transposed = {"weight": weight}, False
        packed.cache = cache or PackedCache()
        return packed

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and of its copies."""
        return super().nbytes + self.cache.nbytes

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns `x Wᵀ + b`, by oneDNN."""
        weight, packed, _ = self.fused(x)
        return linear(x, weight, bias, packed)

    def matmul_dx(self, dy: Tensor) -> Tensor:
        """Returns `dy W`, by oneDNN."""
        weight, _, packed = self.fused(dy)
        return linear_dx(dy, weight, packed)

    def fused(self, x: Tensor) -> FusedOperands:
        """Returns the weight with its copies, as far as they serve this x."""
        weight = self.dense()
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return FusedOperands(weight)
        if type(x) not in _PLAIN or x.dtype != weight.dtype:
            return FusedOperands(weight)
        return FusedOperands(weight, *self.cache.of(weight))

    def moved(self) -> None:
        """Forgets the copies."""
        self.cache = PackedCache()


def packs(weight: Tensor) -> bool:
    """Whether oneDNN multiplies by such a weight, with this torch and processor.

    Not by those made in inference mode, which count no versions, so that nobody would see that they changed.
    """
    if type(weight) not in _PLAIN or weight.device.type != "cpu" or not weight.numel() or not LOADED:
        return False
    if weight.is_inference() or not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    bf16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bf16 or weight.dtype == torch.float32


@torch.no_grad()
def _pack(weight: Tensor) -> Pair:
    reorder = torch.ops.mkldnn._reorder_linear_weight
    return reorder(weight.detach()), reorder(weight.detach().t())
