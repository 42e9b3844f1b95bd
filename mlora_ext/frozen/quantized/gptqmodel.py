"""What gptqmodel's GPTQ and AWQ layers share: integers with a scale and a zero for each group of inputs.

`W[o, i] = scale[g(i), o] (q[o, i] - zero[g(i), o])` (Frantar et al. 2022, "GPTQ"; Lin et al. 2023, "AWQ").

Letters: D = d_in, O = d_out, G groups of inputs, n rows of W in a block, d inputs that are computed at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import BufferedWeight

BITS = (2, 4, 8)
_MOST_LOST_OF_2_BITS = 0.95
"""GPTQ changed numbers by 0.7 to 0.9, rounding them by 0.4 to 0.7; another model differs by more than 1."""
WORD = 32
"""Bits of the integers into which gptqmodel packs small ones."""
_AT_ONCE, _AT_ONCE_ELSEWHERE = 1 << 18, 1 << 22
"""Numbers of W that are computed at once: on a CPU what its cache holds, on other devices enough for them.

Of a W of 4096 x 4096 in fp16, a call's memory with its result peaks at 1.9 times W with `1 << 22`, at 2.5
times with act-order, and at 3.0 times with all at once.
"""


class GroupedWeight(BufferedWeight):
    """A weight of gptqmodel: packed integers, and a scale and a zero for each group of inputs.

    W has the bits of the library's `dequantize_weight`: it is computed in the dtype of the scales. The layer
    gets the buffers `weight_packed`, `weight_zeros` and `weight_scale`, which are the library's own tensors,
    and `weight_group [D]` if the groups are not runs of neighbouring inputs (act-order).

    Args:
        layer: gets the buffers.
        source: gptqmodel's layer whose weight is taken over; `fault_of` has found nothing.
        dtype: of x.
    """

    order: Sequence[int] | None = None
    """Where the integer of each column is in a word of 4-bit integers; None: one after the other."""

    def __init__(self, layer: nn.Module, source: nn.Module, dtype: torch.dtype) -> None:
        own: Any = source
        self._bits, self._scale_dtype = int(own.bits), own.scales.dtype
        self.row_step = WORD // self._bits
        if self._bits == 2:
            self.most_lost = _MOST_LOST_OF_2_BITS
        scale = own.scales.contiguous().view(_INTEGERS[own.scales.dtype.itemsize])
        kept = {"packed": own.qweight, "zeros": own.qzeros, "scale": scale}
        group = source._buffers.get("g_idx")
        if group is not None and not _in_order(group, len(scale)):
            kept["group"] = group.to(torch.int32)
        super().__init__(layer, (own.out_features, own.in_features), dtype, kept)

    def rows(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        scale_Gn = self._kept("scale").view(self._scale_dtype)[:, begin:end].contiguous()
        zero_Gn = self._of_outputs("zeros", begin, end).to(scale_Gn.dtype)
        found_Dn = scale_Gn.new_empty(self.shape[1], end - begin, dtype=dtype)
        at_once = _AT_ONCE if self.device.type == "cpu" else _AT_ONCE_ELSEWHERE
        step = max(1, at_once // (end - begin) // WORD) * WORD
        for first in range(0, len(found_Dn), step):
            part_dn = found_Dn[first : first + step]
            inputs = slice(first, first + len(part_dn))
            group_d = self._groups(inputs)
            code_dn = self._codes(inputs, begin, end).to(scale_Gn.dtype)
            code_dn.sub_(zero_Gn.index_select(0, group_d)).mul_(scale_Gn.index_select(0, group_d))
            part_dn.copy_(code_dn)
        return found_Dn.t()

    @abstractmethod
    def _codes(self, inputs: slice, begin: int, end: int) -> Tensor:
        """Returns the integers of some inputs in rows `[begin, end)` of W: `[d, n]`.

        The first input is a multiple of `WORD`.
        """

    def _of_outputs(self, name: str, begin: int, end: int, inputs: slice = slice(None)) -> Tensor:
        """Returns columns `[begin, end)` of integers that are packed along O."""
        words = self._kept(name)[inputs, begin * self._bits // WORD : -(-end * self._bits // WORD)]
        return unpacked(words, self._bits, 1, self.order)[:, : end - begin]

    def _groups(self, inputs: slice) -> Tensor:
        """Returns the groups of some inputs: `[d]`."""
        if "group" in self._names:
            return self._kept("group")[inputs]
        size = -(-self.shape[1] // len(self._kept("scale")))
        return torch.arange(inputs.start, inputs.stop, device=self.device) // size


_INTEGERS = {2: torch.int16, 4: torch.int32}


def unpacked(words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Returns the integers of int32 words: `dim` is `32 / bits` times as long, the lowest bits first.

    `order`: where the integers of 4 bits are in a word; default: one after the other.
    """
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device)
    if order is not None and bits == 4:
        shifts = shifts[list(order)]
    shifts = shifts.view(-1, *[1] * (words.dim() - dim - 1))
    return (words.unsqueeze(dim + 1) >> shifts).bitwise_and_((1 << bits) - 1).flatten(dim, dim + 1)


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
