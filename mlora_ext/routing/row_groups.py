"""The rows of each adapter in a layer's input, as indices: for layers that compute adapter by adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .route import RouteTensors
from .samples import SampleDim


@dataclass(frozen=True, eq=False)
class RowGroups:
    """Which part of x belongs to which adapter.

    Attributes:
        dim: the dimension of x whose entries belong to one adapter each; None: of x flattened to rows.
        owners: index in `RouteTensors.names` of each group's adapter, -1 for none.
        counts: entries of each group.
        order: `[entries]` the entries of the groups, one group after the other; None if there is one group.
        inverse: where each entry is in `order`.
    """

    dim: int | None
    owners: Sequence[int]
    counts: Sequence[int]
    order: Tensor | None
    inverse: Tensor | None

    def split(self, x: Tensor, lead: int) -> Sequence[Tensor]:
        """Returns each group's part of x, whose first `lead` dimensions are those of rows."""
        if self.order is None:
            return [x]
        if self.dim is None:
            return x.flatten(0, lead - 1).index_select(0, self.order).split(list(self.counts))
        return x.index_select(self.dim, self.order).split(list(self.counts), self.dim)

    def join(self, parts: Sequence[Tensor], lead: torch.Size) -> Tensor:
        """Puts the groups' results together; `lead` are the dimensions of rows of x."""
        if self.inverse is None:
            return parts[0]
        whole = torch.cat(list(parts), self.dim or 0).index_select(self.dim or 0, self.inverse)
        return whole.unflatten(0, lead) if self.dim is None else whole


def by_adapter(
    groups: RowGroups,
    inputs: Sequence[Tensor],
    lead: torch.Size,
    compute: Callable[[int, Sequence[Tensor]], Any],
) -> Any:
    """Returns what `compute(owner, inputs of its group)` returns for each group, in x's order.

    This is a tensor, or a tuple of tensors.

    Args:
        inputs: tensors with the dimensions `lead` first.
        lead: the dimensions of rows.
    """
    split = [groups.split(each, len(lead)) for each in inputs]
    parts = [compute(owner, [own[i] for own in split]) for i, owner in enumerate(groups.owners)]
    if isinstance(parts[0], tuple):
        return tuple(groups.join(each, lead) for each in zip(*parts, strict=True))
    return groups.join(parts, lead)


def row_groups(active: RouteTensors, place: SampleDim | None, batch: int, lead: torch.Size) -> RowGroups:
    """Returns the groups of an input whose dimensions of rows are `lead`.

    Args:
        place: where samples lie in it; None: its flattened rows are in the route's order.
        batch: number of samples.
    """
    found: RowGroups = active.keep((place, tuple(lead)), lambda: _make(active, place, batch, lead))
    return found


def _make(active: RouteTensors, place: SampleDim | None, batch: int, lead: torch.Size) -> RowGroups:
    layout = active.layout
    runs: dict[int, list[tuple[int, int]]] = {owner: [] for owner in range(len(active.names))}
    begin = 0
    for owner, length in zip(layout.adapters, layout.lengths, strict=True):
        if length:
            runs.setdefault(owner, []).append((begin, begin + length))
        begin += length
    owners = sorted(runs)
    if len(owners) == 1:
        return RowGroups(0, owners, [lead[0]], None, None)
    dim: int | None = None
    if place is not None:
        dim, each = place.dim, begin // batch
        entries = lead[dim] // batch
        blocks = {o: _blocks(runs[o], each, place, entries, batch) for o in owners}
    else:
        each = begin // max(1, lead[0])
        whole = each and all(b % each == 0 and e % each == 0 for own in runs.values() for b, e in own)
        dim, each = (0, each) if whole else (None, 1)
        blocks = {o: [(b // each, e // each, 1) for b, e in runs[o]] for o in owners}
    device = active.segments.device
    index = {
        owner: torch.cat([torch.arange(*block, device="cpu") for block in ((0, 0), *blocks[owner])])
        for owner in owners
    }
    order = torch.cat([index[owner] for owner in owners]).to(device)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=device)
    return RowGroups(dim, owners, [len(index[owner]) for owner in owners], order, inverse)


def _blocks(
    runs: Sequence[tuple[int, int]], each: int, place: SampleDim, entries: int, batch: int
) -> list[tuple[int, int, int]]:
    """Returns `(begin, end, step)` of the entries of the samples in runs of rows."""
    samples = [sample for begin, end in runs for sample in range(begin // each, end // each)]
    if place.order == "interleaved":
        return [(sample, entries * batch, batch) for sample in samples]
    return [(sample * entries, (sample + 1) * entries, 1) for sample in samples]
