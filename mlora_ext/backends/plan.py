"""The tile plan of a batch: its sizes, known on the host, and its tables on the device, made once.

Letters: T rows, N adapters, S rows of the table `segments`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

Row = tuple[int, int, int, int]
"""Of a table of four columns."""
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
    def of_segments(segments: Sequence[Row], rows: int, adapters: int) -> PlanSizes:
        """Returns the sizes that these segments need."""
        tiles, base, reached = [0] * adapters, 0, 0
        for begin, end, adapter, _ in segments:
            if 0 <= adapter < adapters and begin < end:
                tiles[adapter] += _ceil_div(end - begin, TILE_ROWS)
                base += _ceil_div(begin - reached, TILE_ROWS)
                reached = end
        base += _ceil_div(rows - reached, TILE_ROWS)
        runs = [max(1, _ceil_div(count, SPLIT_TILES)) for count in tiles]
        splits = sum(runs) + _ceil_div(base, SPLIT_TILES)
        return PlanSizes(rows, adapters, sum(tiles) + base, splits, sum(run for run in runs if run > 1))


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan's int32 tables on the device, `[*, 4]` each; docs/dev/gpu.md gives their columns.

    Attributes:
        sizes: of the tables.
        whole: the tables, one below the other, and what the backend wants behind them.
    """

    sizes: PlanSizes
    whole: Tensor

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns tiles, splits and groups as views."""
        sizes = self.sizes
        sizes_of = [sizes.tiles, sizes.splits, sizes.adapters]
        tiles, splits, groups = self.whole[: sum(sizes_of)].split(sizes_of)
        return tiles, splits, groups


MakePlan = Callable[[Tensor, PlanSizes], Plan]


class PlanCache:
    """Keeps the plan of a `segments` table until the table is freed or written to.

    All layers of a batch are called with the same table, so a batch is planned once.

    Args:
        make: makes a plan.
        capture: returns the id of the capture of a CUDA graph that a tensor's stream takes part in: a graph
            must hold the launch that makes its plan, and its sizes must serve any layout. None: plans are
            made on the host.
    """

    def __init__(self, make: MakePlan, capture: Callable[[Tensor], int] | None = None) -> None:
        self._make, self._capture = make, capture
        self._plans: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._latest: tuple[Callable[[], Tensor | None], tuple[int, ...], Callable[[], Plan | None]] | None
        self._latest = None

    def get(self, segments: Tensor, rows: int, adapters: int) -> Plan:
        """Returns the plan of `segments [S, 4]` int64, ascending rows `(begin, end, adapter, row0)`."""
        # Tables made in inference mode count no versions, so a change would go unseen.
        if segments.is_inference():
            return self._make(segments, self._sizes(segments, rows, adapters))
        stream = captured = 0
        if segments.is_cuda:
            # another stream would not wait for the tables; `current_stream` makes an object each time
            stream = torch._C._cuda_getCurrentRawStream(segments.device.index)
            captured = self._capture_of(segments)
        key = segments._version, rows, adapters, stream, captured
        latest = self._latest  # a batch's layers ask one after the other
        if latest is not None and latest[0]() is segments and latest[1] == key and (plan := latest[2]()):
            return plan
        kept: tuple[int, dict[tuple[int, ...], Plan]] | None = self._plans.get(segments)
        if kept is None or kept[0] != segments._version:
            kept = self._plans[segments] = (segments._version, {})
        if key not in kept[1]:
            kept[1][key] = self._make(segments, self._sizes(segments, rows, adapters, captured > 0))
        plan = kept[1][key]
        self._latest = weakref.ref(segments), key, weakref.ref(plan)
        return plan

    def _capture_of(self, segments: Tensor) -> int:
        """Returns the id of the capture that the stream of a table on a GPU takes part in, or 0."""
        device = segments.device.index
        if device == torch.cuda.current_device() and not torch.cuda.is_current_stream_capturing():
            return 0
        if self._capture is not None:
            return self._capture(segments)
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "backend 'triton' makes plans on the host, which no CUDA graph can hold; use 'cuda'"
                )
        return 0

    def _sizes(self, segments: Tensor, rows: int, adapters: int, captured: bool = False) -> PlanSizes:
        if self._capture is None or (not captured and _described(segments) is not None):
            return PlanSizes.of_segments(rows_of(segments), rows, adapters)
        return PlanSizes.bounds(rows, len(segments), adapters)


_rows: WeakIdKeyDictionary = WeakIdKeyDictionary()


def describe(segments: Tensor, rows: Sequence[Row]) -> None:
    """Notes what a table holds, so that nobody has to ask its device."""
    _rows[segments] = segments._version, rows


def _described(segments: Tensor) -> Sequence[Row] | None:
    version, rows = _rows.get(segments, (None, None))
    return rows if version is not None and version == segments._version else None


def rows_of(segments: Tensor) -> Sequence[Row]:
    """Returns the rows of a table; waits for its device unless they were described."""
    known = _described(segments)
    return [tuple(row) for row in segments.tolist()] if known is None else known
