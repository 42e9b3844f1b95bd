"""The tile plan of a batch: its sizes, known on the host, and its tables, made once on the device.

Letters: T rows, N adapters, S rows of the table `segments`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

TILE_ROWS = 64
SPLIT_TILES = 16


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class PlanSizes:
    """Row counts of the plan's tables: upper bounds, or exact ones where the layout is known on the host.

    Attributes:
        rows: T.
        adapters: N.
        tiles: rows of `tiles`.
        splits: rows of `splits`.
        slots: number of partial gradients; only an adapter of over `SPLIT_TILES` tiles has any, at least two.
    """

    rows: int
    adapters: int
    tiles: int
    splits: int
    slots: int

    @staticmethod
    def bounds(rows: int, segments: int, adapters: int) -> PlanSizes:
        """Returns sizes that serve any layout of T rows in S segments."""
        tiles = _ceil_div(rows, TILE_ROWS) + 2 * segments + 1
        most = min(rows, _ceil_div(rows, TILE_ROWS) + segments)
        slots = 0 if most <= SPLIT_TILES else _ceil_div(2 * most, SPLIT_TILES)
        return PlanSizes(rows, adapters, tiles, _ceil_div(tiles, SPLIT_TILES) + adapters + 1, slots)

    @staticmethod
    def of_layout(lengths: Sequence[int], owners: Sequence[int], rows: int, adapters: int) -> PlanSizes:
        """Returns the sizes that segments of these lengths and adapters need."""
        tiles, base, reached, begin = [0] * adapters, 0, 0, 0
        for length, adapter in zip(lengths, owners, strict=True):
            if 0 <= adapter < adapters and length:
                tiles[adapter] += _ceil_div(length, TILE_ROWS)
                base += _ceil_div(begin - reached, TILE_ROWS)
                reached = begin + length
            begin += length
        base += _ceil_div(rows - reached, TILE_ROWS)
        runs = [max(1, _ceil_div(count, SPLIT_TILES)) for count in tiles]
        splits = sum(runs) + _ceil_div(base, SPLIT_TILES)
        return PlanSizes(rows, adapters, sum(tiles) + base, splits, sum(run for run in runs if run > 1))


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan's int32 tables on the device, `[*, 4]` each; docs/gpu.md gives their columns.

    Attributes:
        sizes: of the tables.
        whole: the tables, one below the other.
    """

    sizes: PlanSizes
    whole: Tensor

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns tiles, splits and groups as views."""
        sizes = self.sizes
        tiles, splits, groups = self.whole.split([sizes.tiles, sizes.splits, sizes.adapters])
        return tiles, splits, groups


MakePlan = Callable[[Tensor, PlanSizes], Plan]


class PlanCache:
    """Keeps the plan of a `segments` table until the table is freed or written to.

    All layers of a batch are called with the same table, so a batch is planned once.

    Args:
        make: makes a plan.
        capture: returns the id of the capture of a CUDA graph that a tensor's stream takes part in. A graph
            must hold the launch that makes its plans, so a plan serves the capture that made it. None: while
            a graph is captured, each call makes its plan.
    """

    def __init__(self, make: MakePlan, capture: Callable[[Tensor], int] | None = None) -> None:
        self._make, self._capture = make, capture
        self._plans: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def get(self, segments: Tensor, rows: int, adapters: int) -> Plan:
        """Returns the plan of `segments [S, 4]` int64, ascending rows `(begin, end, adapter, row0)`."""
        stream = captured = 0
        if segments.is_cuda:
            # another stream would not wait for the tables
            stream = torch.cuda.current_stream(segments.device).cuda_stream
            if torch.cuda.is_current_stream_capturing():
                captured = -1 if self._capture is None else self._capture(segments)
        # Tables made in inference mode count no versions, so a change would go unseen.
        if captured < 0 or segments.is_inference():
            return self._make(segments, _sizes(segments, rows, adapters, exact=False))
        kept: tuple[int, dict[tuple[int, ...], Plan]] | None = self._plans.get(segments)
        if kept is None or kept[0] != segments._version:
            kept = self._plans[segments] = (segments._version, {})
        key = rows, adapters, stream, captured
        if key not in kept[1]:
            kept[1][key] = self._make(segments, _sizes(segments, rows, adapters, exact=not captured))
        return kept[1][key]


_layouts: WeakIdKeyDictionary = WeakIdKeyDictionary()


def describe(segments: Tensor, lengths: Sequence[int], owners: Sequence[int]) -> None:
    """Notes the layout that a table holds, so that a plan has exactly the rows that it needs.

    Args:
        segments: the table.
        lengths: rows of each segment, from row 0 on.
        owners: adapter of each segment, or -1.
    """
    _layouts[segments] = segments._version, lengths, owners


def _sizes(segments: Tensor, rows: int, adapters: int, exact: bool) -> PlanSizes:
    """Returns bounds where a captured graph may run with another layout in the table."""
    kept = _layouts.get(segments)
    if exact and kept is not None and kept[0] == segments._version:
        return PlanSizes.of_layout(kept[1], kept[2], rows, adapters)
    return PlanSizes.bounds(rows, len(segments), adapters)
