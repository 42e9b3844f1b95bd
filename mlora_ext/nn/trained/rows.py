"""Rows of an embedding or head that adapters train (`trainable_token_indices`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...adapters.kind import LayerSpec


def positions(tokens: Sequence[int], ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns where each id stands in `tokens` (any place if nowhere), and whether it does.

    Args:
        tokens: n tokens, each once.
        ids: `[...]` integers.
    """
    known, order = torch.tensor(tokens, dtype=ids.dtype, device=ids.device).sort()
    at = torch.searchsorted(known, ids.contiguous()).clamp(max=len(tokens) - 1)
    return order[at], known[at] == ids


def start_rows(own: Mapping[str, nn.Parameter], base: nn.Module, spec: LayerSpec) -> None:
    """Fills new trained rows with the base's."""
    weight: Any = base.weight
    with torch.no_grad():
        for rows in own.values():
            rows.copy_(weight[list(spec.tokens)])
