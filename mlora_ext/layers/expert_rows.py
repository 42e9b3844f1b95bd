"""Rows of a batch, once for each expert that they go to, sorted by expert and then by adapter.

Letters: T rows of the batch, K experts of a row, S = T · K, E experts, N adapters. Everything stays on the
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..frozen.experts import Groups


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """The sorted rows. Within an expert and an adapter they keep their order.

    Attributes:
        chosen: K.
        order: `[S]` int64: which of the T · K choices each sorted row is.
        places: `[S]` int64: the sorted row of each choice; the inverse of `order`.
        bounds: `[E · (N + 1) + 1]` int64: where the rows of each expert and adapter begin; within an expert,
            rows without an adapter come last.
        groups: the rows of each expert.
    """

    chosen: int
    order: Tensor
    places: Tensor
    bounds: Tensor
    groups: Groups

    @staticmethod
    def sort(index: Tensor, owners: Tensor, experts: int, adapters: int) -> ExpertRows:
        """Sorts the rows of a batch.

        Args:
            index: `[T, K]`, the experts of each row, each in `[0, E)`.
            owners: `[T]`, the adapter of each row, N for none.
            experts: E.
            adapters: N.
        """
        slots = adapters + 1
        keys, order = (index * slots + owners.unsqueeze(1)).flatten().sort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        every = torch.arange(experts * slots + 1, device=order.device)
        bounds = torch.searchsorted(keys, every)
        groups = Groups(keys // slots, bounds[slots::slots].to(torch.int32))
        return ExpertRows(index.shape[1], order, places, bounds, groups)

    def segments(self, pairs: Tensor) -> Tensor:
        """Returns the operator's `segments`; `pairs [E · (N + 1)]` tells the pair of each, -1 for none."""
        rows = self.bounds[:-1], self.bounds[1:], pairs, torch.zeros_like(pairs)
        return torch.stack(rows, 1)

    def gather(self, x: Tensor) -> Tensor:
        """Returns the sorted rows `[S, D]` of x `[T, D]`."""
        return _Gather.apply(x, self)  # type: ignore[no-any-return]

    def scatter(self, y: Tensor) -> Tensor:
        """Returns sorted rows `[S, D]` as `[T, K, D]`."""
        return _Scatter.apply(y, self).view(-1, self.chosen, y.shape[1])  # type: ignore[no-any-return]


def pairs_of(places: tuple[int, ...], experts: int, device: torch.device) -> Tensor:
    """Returns `[E · (N + 1)]`: the index `place · E + expert` of each pair, -1 for none.

    Args:
        places: of each of the N adapters in the operator's lists, -1 for one that is not in them.
        experts: E.
        device: of the result.
    """
    place = torch.tensor((*places, -1), device="cpu").view(1, -1)
    pairs = torch.where(place < 0, -1, place * experts + torch.arange(experts, device="cpu").view(-1, 1))
    return pairs.flatten().to(device)


class _Gather(torch.autograd.Function):
    """Its gradient is a sum over each row's choices in their own order: the same bits in every run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: ExpertRows) -> Tensor:
        ctx.rows = rows
        return x.index_select(0, rows.order // rows.chosen)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.rows.scatter(dy).sum(1), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: ExpertRows) -> Tensor:
        ctx.rows = rows
        return y.index_select(0, rows.places)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dy.index_select(0, ctx.rows.order), None
