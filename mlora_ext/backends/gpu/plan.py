"""The tile plan of a batch: its sizes, known on the host, and its tables, made once on the device.

Letters: T rows, N adapters, S rows of the table `segments`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

TILE_ROWS = 64
SPLIT_TILES = 16
COLUMN_SPLIT = 2048


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class PlanSizes:
    """T, S and N, and the row counts of the plan's tables: upper bounds that need no look at the device."""

    rows: int
    segments: int
    adapters: int

    @property
    def tiles(self) -> int:
        """Rows of `tiles`: those of adapters, of the gaps between segments, and behind the last segment."""
        return _ceil_div(self.rows, TILE_ROWS) + 2 * self.segments + 1

    @property
    def splits(self) -> int:
        return _ceil_div(self.tiles, SPLIT_TILES) + self.adapters + 1

    @property
    def slots(self) -> int:
        """Number of partial gradients; only an adapter of over `SPLIT_TILES` tiles has any, at least two."""
        tiles = min(self.rows, _ceil_div(self.rows, TILE_ROWS) + self.segments)
        return 0 if tiles <= SPLIT_TILES else _ceil_div(2 * tiles, SPLIT_TILES)


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan's int32 tables on the device, `[*, 4]` each; docs/gpu.md gives their columns."""

    sizes: PlanSizes
    tiles: Tensor
    splits: Tensor
    groups: Tensor

    @staticmethod
    def empty(sizes: PlanSizes, device: torch.device) -> Plan:
        """Returns tables for a `plan` launch to fill."""
        counts = (sizes.tiles, sizes.splits, sizes.adapters)
        return Plan(sizes, *torch.empty(sum(counts), 4, dtype=torch.int32, device=device).split(counts))


MakePlan = Callable[[Tensor, PlanSizes], Plan]


class PlanCache:
    """Keeps the plan of a `segments` table until the table is freed or written to.

    All layers of a batch are called with the same table, so a batch is planned once.
    """

    def __init__(self, make: MakePlan) -> None:
        self._make = make
        self._plans: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def get(self, segments: Tensor, sizes: PlanSizes) -> Plan:
        """Returns the plan of `segments [S, 4]` int64, ascending rows `(begin, end, adapter, row0)`."""
        # Tables made in inference mode count no versions, so a change would go unseen. A graph that is being
        # captured must hold the launch that makes its plan: the tables are made when the graph runs.
        if segments.is_inference() or (segments.is_cuda and torch.cuda.is_current_stream_capturing()):
            return self._make(segments, sizes)
        kept: tuple[int, dict[tuple[PlanSizes, int], Plan]] | None = self._plans.get(segments)
        if kept is None or kept[0] != segments._version:
            kept = self._plans[segments] = (segments._version, {})
        # another stream would not wait for the tables
        stream = torch.cuda.current_stream(segments.device).cuda_stream if segments.is_cuda else 0
        if (sizes, stream) not in kept[1]:
            kept[1][sizes, stream] = self._make(segments, sizes)
        return kept[1][sizes, stream]
