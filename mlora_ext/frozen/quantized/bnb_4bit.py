"""bitsandbytes' nf4 and fp4 (QLoRA, Dettmers et al. 2023, section 3), also with double quantisation."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import BufferedWeight, bits_of, floats_of


class Bnb4bitWeight(BufferedWeight):
    """Two numbers a byte, and a scale `absmax` for each `blocksize` numbers of the flattened W.

    The layer's buffers hold the state: `weight_4bit`, `weight_absmax`, and with double quantisation
    `weight_absmax_scale`, `weight_absmax_code` and `weight_absmax_offset`.

    Args:
        layer: gets the buffers.
        source: the `bitsandbytes.nn.Linear4bit` whose weight is taken over.
    """

    def __init__(self, layer: nn.Module, source: nn.Module) -> None:
        data, state = _packed_in_rows(source)
        kept = {"4bit": data.contiguous().view(torch.uint8).reshape(-1), "absmax": state.absmax}
        if state.nested:
            kept |= {"absmax_scale": bits_of(state.state2.absmax), "absmax_code": bits_of(state.state2.code)}
            kept["absmax_offset"] = bits_of(state.offset)
        else:
            kept["absmax"] = bits_of(state.absmax)
        super().__init__(layer, (int(state.shape[0]), int(state.shape[1])), state.dtype, kept)
        self._type, self._blocksize = state.quant_type, state.blocksize
        self._nested_blocksize = state.state2.blocksize if state.nested else 0
        self.compute_dtype = source.compute_dtype  # type: ignore[assignment]
        self.row_step = self._aligned_rows()

    def _aligned_rows(self) -> int:
        """Returns the number of rows after which a scale begins at a row; all rows where widths do not fit.

        There, bitsandbytes' CPU kernel computes other numbers for some rows alone than for all rows.
        """
        rows, columns = self._shape
        return 1 if columns % self._blocksize == 0 else max(1, rows)

    def rows(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        import bitsandbytes  # noqa: F401 - registers the operators

        columns, size = self._shape[1], self._blocksize
        first, last = begin * columns, end * columns
        scales = self._absmax()[first // size : -(-last // size)]
        packed = self._kept("4bit")[first // 2 : -(-last // 2)].view(-1, 1)
        shape = (end - begin, columns)
        found: Tensor = torch.ops.bitsandbytes.dequantize_4bit(packed, scales, size, self._type, shape, dtype)
        return found

    def _absmax(self) -> Tensor:
        """Returns all scales in fp32: 1/16 of the bytes of an fp32 W for blocks of 64."""
        absmax = self._kept("absmax")
        if not self._nested_blocksize:
            return floats_of(absmax)
        scale, code = floats_of(self._kept("absmax_scale")), floats_of(self._kept("absmax_code"))
        whole: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
            absmax, scale, code, self._nested_blocksize, torch.float32
        )
        return whole + floats_of(self._kept("absmax_offset"))


def _packed_in_rows(source: nn.Module) -> tuple[Tensor, Any]:
    """Returns the 4-bit numbers in the order of W's rows, and bitsandbytes' state.

    An evaluation without gradients, on processors with AVX512-BF16, leaves them in another order, and the
    scales in bf16 `[D / blocksize, O]`, no longer quantised. bitsandbytes keeps that order on its way back.
    """
    weight: Any = source.weight
    state: Any = getattr(weight, "quant_state", None) or getattr(source, "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):
        from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse

        scales = state.absmax.T.reshape(-1)
        data, state = _convert_weight_packed_for_cpu_inverse(weight.data, copy.copy(state))
        state.absmax, state.nested = scales, False
        return data, state
    return weight.data, state


def fault(source: nn.Module) -> str | None:
    """Returns why a `Linear4bit` cannot be taken over, or None."""
    weight: Any = source.weight
    state = getattr(weight, "quant_state", None) or getattr(source, "quant_state", None)
    if state is None:
        return "its 4-bit weight is not quantised yet: move the layer to its device first (`.to(device)`)"
    if len(state.shape) != 2 or math.prod(state.shape) > 2 * weight.data.nbytes:
        return f"its 4-bit weight of shape {list(weight.shape)} is not one of {list(state.shape)}"
    return None
