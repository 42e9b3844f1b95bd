"""A frozen weight that is also kept in oneDNN's layouts: faster, for about three times the memory."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from ..library import LOADED
from .base_gemm import linear, linear_dx
from .plain import PlainWeight
from .weight import FusedOperands

Pair = tuple[Tensor | None, Tensor | None]
"""The weight packed for `x Wᵀ` and for `dy W`."""
_NOT_PACKED: Pair = (None, None)
_PLAIN = (Tensor, nn.Parameter)  # no fake tensors: they have no numbers to pack


class PackedCache:
    """The packed copies of one weight; layers with tied weights share a cache.

    It follows the weight by address and version, and packs again at the next use after its numbers, strides
    or dtype change. Writes through `.data`, `.detach()` or numpy count no version and are not seen. Copies
    and unpickled caches start empty.
    """

    def __init__(self) -> None:
        # (key of the weight, the weight itself so that its address is not used again, packed pair)
        self._state: tuple[tuple[Any, ...], Tensor | None, Pair] = ((), None, _NOT_PACKED)

    def of(self, weight: Tensor) -> Pair:
        """Returns the weight `[O, D]` packed for each direction, or Nones where oneDNN does not serve it."""
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
        """Bytes of the packed tensors, with oneDNN's padding."""
        return sum(torch.ops.mkldnn._nbytes(tensor) for tensor in self._state[2] if tensor is not None)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return PackedCache, ()


class PackedWeight(PlainWeight):
    """A layer's own `weight`, with one oneDNN copy for each direction.

    Args:
        layer: as for `PlainWeight`.
        cache: the cache of another layer with the same weight; default: a new one.
    """

    def __init__(self, layer: nn.Module, cache: PackedCache | None = None) -> None:
        super().__init__(layer)
        self.cache = cache or PackedCache()

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """Makes a frozen weight that belongs to no layer."""
        packed = super().of(weight)
        packed.cache = PackedCache()
        return packed

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and its copies."""
        return super().nbytes + self.cache.nbytes

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns `x Wᵀ + b` by oneDNN."""
        weight, packed, _ = self.fused(x)
        return linear(x, weight, bias, packed)

    def matmul_dx(self, dy: Tensor) -> Tensor:
        """Returns `dy W` by oneDNN."""
        weight, _, packed = self.fused(dy)
        return linear_dx(dy, weight, packed)

    def fused(self, x: Tensor) -> FusedOperands:
        """Returns the weight, and its packed copies where they can be used for this x."""
        weight = self.dense()
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return FusedOperands(weight)
        if type(x) not in _PLAIN or x.dtype != weight.dtype:
            return FusedOperands(weight)
        return FusedOperands(weight, *self.cache.of(weight))

    def moved(self) -> None:
        """Drops the packed copies."""
        self.cache = PackedCache()


def packs(weight: Tensor) -> bool:
    """Whether oneDNN can multiply by this weight, with this torch and processor.

    Weights made in inference mode are excluded: they count no versions, so a change would go unseen.
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
