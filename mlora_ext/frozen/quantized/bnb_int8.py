"""bitsandbytes' 8-bit integers (LLM.int8(), Dettmers et al. 2022), used without quantising x."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .blocks import BufferedWeight, bits_of, floats_of


class BnbInt8Weight(BufferedWeight):
    """`W = q s / 127` with integers `q [O, D]` and a scale `s [O]` for each row.

    On a CPU, bitsandbytes trains through the same product. In evaluation mode, and on a GPU, its own layer
    also quantises x: with columns of large values left out, which depends on all rows of a batch, so that
    one adapter's rows would change another's results. This class never does.

    Args:
        layer: gets the buffers `weight_int8` and `weight_scale`.
        source: the `bitsandbytes.nn.Linear8bitLt` whose weight is taken over.
        dtype: of x.
    """

    def __init__(self, layer: nn.Module, source: nn.Module, dtype: torch.dtype) -> None:
        weight: Any = source.weight
        scale = _scale(source)
        assert scale is not None
        rows, columns = weight.shape
        kept = {"int8": weight.data, "scale": bits_of(scale.to(weight.device))}
        super().__init__(layer, (rows, columns), dtype, kept)

    def rows(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        scale = floats_of(self._kept("scale"))[begin:end].mul(1.0 / 127.0)
        return self._kept("int8")[begin:end].to(dtype).mul_(scale.unsqueeze(1))


def _scale(source: nn.Module) -> Tensor | None:
    """Returns the rows' scales; the first forward pass moves them from the weight to the layer's state."""
    state: Any = source.state
    scale: Tensor | None = getattr(source.weight, "SCB", None)
    return state.SCB if scale is None else scale


def fault(source: nn.Module) -> str | None:
    """Returns why a `Linear8bitLt` cannot be taken over, or None."""
    weight: Any = source.weight
    if source.state.has_fp16_weights:  # type: ignore[union-attr]
        return "its weight stays in fp16 (has_fp16_weights=True): use a plain nn.Linear, or False"
    if weight.dtype != torch.int8 or _scale(source) is None:
        return "its 8-bit weight is not quantised yet: move the layer to its device first (`.to(device)`)"
    return None
