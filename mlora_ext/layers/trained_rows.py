"""Rows of an embedding or head that adapters train (`trainable_token_indices`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..adapters.kind import LayerSpec
from ..frozen.quantized.families import is_library_layer, is_quantized
from .over_module import plain_module


def positions(tokens: Sequence[int], ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns where each id stands in `tokens` (any place if nowhere), and whether it does.

    Args:
        tokens: n tokens, each once.
        ids: `[...]` integers.
    """
    known, order = torch.tensor(tokens, dtype=ids.dtype, device=ids.device).sort()
    at = torch.searchsorted(known, ids.contiguous()).clamp(max=len(tokens) - 1)
    return order[at], known[at] == ids


def has_plain_rows(module: nn.Module) -> bool:
    """Whether a module, converted or not, has a weight with rows of numbers: not quantised, not sharded."""
    weight = plain_module(module)._parameters.get("weight")
    if weight is None or not weight.is_floating_point() or is_traceable_wrapper_subclass(weight):
        return False
    return not is_quantized(module) and not is_library_layer(module)


def start_rows(own: Mapping[str, nn.Parameter], base: nn.Module, spec: LayerSpec) -> None:
    """Fills new trained rows with the base's."""
    weight: Any = base.weight
    with torch.no_grad():
        for rows in own.values():
            rows.copy_(weight[list(spec.tokens)])
