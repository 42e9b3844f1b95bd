"""What gptqmodel's GPTQ and AWQ layers share: integers with a scale and a zero for each group of inputs.

`W[o, i] = scale[g(i), o] (q[o, i] - zero[g(i), o])` (Frantar et al. 2022, "GPTQ"; Lin et al. 2023, "AWQ").

Letters: D = d_in, O = d_out, G groups of inputs, n rows of W in a block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import QuantizedWeight

BITS = (2, 4, 8)
_MOST_LOST_OF_2_BITS = 0.95
"""GPTQ changed numbers by 0.7 to 0.9, rounding them by 0.4 to 0.7; another model differs by more than 1."""
WORD = 32
"""Bits of the integers into which gptqmodel packs small ones."""


class GroupedWeight(QuantizedWeight):
    """A weight of gptqmodel: packed integers, and a scale and a zero for each group of inputs.

    W has the bits of the library's `dequantize_weight`: it is computed in the dtype of the scales. The layer
    gets the buffers `weight_packed`, `weight_zeros` and `weight_scale`, which are the library's own tensors,
    and `weight_group [D]` if the groups are not runs of neighbouring inputs (act-order). The scale is kept as
    integers, because a change of the model's dtype leaves these alone.

    Args:
        layer: gets the buffers.
        source: gptqmodel's layer whose weight is taken over; `fault_of` has found nothing.
        dtype: of x.
    """

    def __init__(self, layer: nn.Module, source: nn.Module, dtype: torch.dtype) -> None:
        own: Any = source
        self._shape, self._dtype = (own.out_features, own.in_features), dtype
        self._bits, self._scale_dtype = int(own.bits), own.scales.dtype
        self.row_step = WORD // self._bits
        if self._bits == 2:
            self.most_lost = _MOST_LOST_OF_2_BITS
        self._buffers: Mapping[str, Tensor | None] = layer._buffers
        layer._parameters["weight"] = None
        scale = own.scales.contiguous().view(_INTEGERS[own.scales.dtype.itemsize])
        kept = {"packed": own.qweight, "zeros": own.qzeros, "scale": scale}
        group = source._buffers.get("g_idx")
        if group is not None and not _in_order(group, len(scale)):
            kept["group"] = group.to(torch.int32)
        for name, tensor in kept.items():
            layer.register_buffer(f"weight_{name}", tensor.detach())

    @property
    def shape(self) -> tuple[int, int]:
        """`(O, D)`."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model when its weights were taken over."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._kept("packed").device

    @property
    def nbytes(self) -> int:
        """Bytes of the integers, their scales, their zeros and the order of their groups."""
        return sum(
            t.nbytes for key, t in self._buffers.items() if key.startswith("weight_") and t is not None
        )

    def rows(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        scale = self._kept("scale").view(self._scale_dtype)[:, begin:end].t()
        first, last = begin * self._bits // WORD, -(-end * self._bits // WORD)
        zero = unpacked(self._kept("zeros")[:, first:last], self._bits, self.interleaved)
        zero = zero[:, : end - begin].t().to(scale.dtype)
        found = self._codes(begin, end).to(scale.dtype)
        group = self._buffers.get("weight_group")
        if group is not None:
            found = found.sub_(zero[:, group]).mul_(scale[:, group])
        else:
            columns = found.shape[1]
            found = found.view(end - begin, -1, min(columns, -(-columns // scale.shape[1])))
            found.sub_(zero.unsqueeze(2)).mul_(scale.unsqueeze(2))
        return found.view(end - begin, -1).to(dtype)

    interleaved = False
    """Whether eight 4-bit integers stand in a word in AWQ's order."""

    @abstractmethod
    def _codes(self, begin: int, end: int) -> Tensor:
        """Returns the integers of rows `[begin, end)` of W: `[n, D]` uint8."""

    def _kept(self, name: str) -> Tensor:
        tensor = self._buffers[f"weight_{name}"]
        assert tensor is not None
        return tensor


_INTEGERS = {2: torch.int16, 4: torch.int32}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the integer of each column is in a word."""


def unpacked(words: Tensor, bits: int, interleaved: bool = False) -> Tensor:
    """Returns the integers `[..., W * 32 / bits]` uint8 in int32 words `[..., W]`, the lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
    found = (octets.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1).flatten(-2)
    if interleaved and bits == 4:
        found = found.unflatten(-1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(-2)
    return found


def _in_order(group: Tensor, groups: int) -> bool:
    """Whether input i is in group `i // size`, with groups of one size."""
    size = -(-len(group) // groups)
    ordered = torch.arange(len(group), device=group.device, dtype=group.dtype) // size
    return len(group) == size * groups and bool(torch.equal(group, ordered))


def fault_of_kernel(source: nn.Module, kernels: Collection[str], advice: str) -> str | None:
    """Returns why a layer of gptqmodel cannot be taken over, or None.

    Args:
        source: a `BaseQuantLinear`.
        kernels: names of the classes that hold W as the checkpoint does.
        advice: what to write to get one of them.
    """
    own: Any = source
    name = type(source).__name__
    if name not in kernels:
        return f"gptqmodel's kernel {name} holds W in an order of its own; load the model with {advice}"
    if own.bits not in BITS:
        return f"its weight has {own.bits} bits; 2, 4 and 8 are served"
    if own.adapter is not None or own.online_full_had or own.online_partial_had:
        return "it has an adapter of gptqmodel or rotates x, which is not served; load the model without"
    if own.qweight.dtype != torch.int32 or own.qzeros.dtype != torch.int32:
        return (
            "its integers are not packed as in the checkpoint, as after an evaluation by a fused kernel; "
            f"convert the model before you evaluate it, or load it with {advice}"
        )
    return None
