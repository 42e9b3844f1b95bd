"""The tile plan of a batch: its sizes, which the host knows, and its tables, which the device makes once.

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
    """Rows of the plan's tables; upper bounds that need no look at the device.

    Attributes:
        rows: T.
        segments: S.
        adapters: N.
    """

    rows: int
    segments: int
    adapters: int

    @property
    def tiles(self) -> int:
        """Rows of `tiles`: those of adapters, of the gaps between their segments, and behind the last."""
        return _ceil_div(self.rows, TILE_ROWS) + 2 * self.segments + 1

    @property
    def splits(self) -> int:
        """Rows of `splits`."""
        return _ceil_div(self.tiles, SPLIT_TILES) + self.adapters + 1

    @property
    def slots(self) -> int:
        """Partial gradients: only an adapter of more than `SPLIT_TILES` tiles has any, at least two."""
        tiles = min(self.rows, _ceil_div(self.rows, TILE_ROWS) + self.segments)
        return 0 if tiles <= SPLIT_TILES else _ceil_div(2 * tiles, SPLIT_TILES)


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan's int32 tables on the device, `[*, 4]` each; docs/gpu.md says what their columns mean."""

    sizes: PlanSizes
    tiles: Tensor
    splits: Tensor
    groups: Tensor

    @staticmethod
    def empty(sizes: PlanSizes, device: torch.device) -> Plan:
        """Tables that a `plan` launch is going to fill."""
        counts = (sizes.tiles, sizes.splits, sizes.adapters)
        return Plan(sizes, *torch.empty(sum(counts), 4, dtype=torch.int32, device=device).split(counts))


MakePlan = Callable[[Tensor, PlanSizes], Plan]


class PlanCache:
    """Plans by table of segments, as long as that table lives and is not written to.

    All layers of a batch are called with the same table, so a batch is planned once.

    Args:
        make: launches the kernel that makes a plan.
    """

    def __init__(self, make: MakePlan) -> None:
        self._make = make
        self._plans: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def get(self, segments: Tensor, sizes: PlanSizes) -> Plan:
        """The plan of these segments.

        Args:
            segments: `[S, 4]` int64, rows `(begin, end, adapter, row0)`, ascending.
            sizes: T, S and N.

        Returns:
            The plan, made now or by an earlier call of the batch.
        """
        # Tables of inference mode count no versions, so nobody would see that they changed. A graph that is
        # being captured has to hold the launch that makes its plan, and its tables are made when it runs.
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
