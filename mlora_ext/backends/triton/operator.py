"""The backend `triton`: one layer a call, a launch at a time, in the order of docs/dev/gpu.md.

The low-rank part is written first and the frozen product adds to it. Nothing here grows with the adapters.
Letters: T rows, D = d_in, O = d_out, R largest rank, N adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...upload import to_device
from ..factors import Factors
from ..interface import Adapters, Layer, PlanTensors, Saved, Wanted
from ..plan import SPLIT_TILES, TILE_ROWS, Plan, PlanCache, PlanSizes, Row, rows_of
from .backward import read_dy, read_x, reduce_gradients, reduce_rows
from .blocks import PANEL as _PANEL
from .forward import expand, shrink


def plan_rows(segments: Sequence[Row], rows: int, adapters: int) -> tuple[list[Row], list[Row], list[Row]]:
    """Returns the rows of `tiles`, `splits` and `groups`.

    Args:
        segments: rows `(begin, end, adapter, row0)`, ascending.
        rows: T.
        adapters: N; a segment of another one counts as one of -1.
    """
    served = [one for one in segments if 0 <= one[2] < adapters and one[0] < one[1]]
    tiles: list[Row] = []
    splits: list[Row] = []
    groups: list[Row] = []
    slots = 0
    for adapter in range(adapters):
        first = len(tiles)
        for begin, end, who, row0 in served:
            if who == adapter:
                tiles += _tiles(begin, end, adapter, row0)
        cuts = range(first, max(len(tiles), first + 1), SPLIT_TILES)
        several = len(cuts) > 1
        for number, cut in enumerate(cuts):
            slot = slots + number if several else -1
            splits.append((cut, min(cut + SPLIT_TILES, len(tiles)), adapter, slot))
        groups.append((first, len(tiles), slots, len(cuts) if several else 0))
        slots += len(cuts) if several else 0
    first, reached = len(tiles), 0
    for begin, end, _, _ in [*served, (rows, rows, -1, 0)]:
        tiles += _tiles(reached, begin, -1, 0)
        reached = end
    splits += [
        (cut, min(cut + SPLIT_TILES, len(tiles)), -1, -1) for cut in range(first, len(tiles), SPLIT_TILES)
    ]
    return tiles, splits, groups


def _tiles(begin: int, end: int, adapter: int, row0: int) -> Iterator[Row]:
    for row in range(begin, end, TILE_ROWS):
        philox_row = 0 if adapter < 0 else (row0 + row - begin + 2**31) % 2**32 - 2**31
        yield row, min(TILE_ROWS, end - row), adapter, philox_row


INTERPRETED: bool = triton.knobs.runtime.interpret and not isinstance(tl.sum, triton.JITFunction)
"""Whether these kernels and those of Triton's own library were made for its interpreter."""
PANEL: int = _PANEL.value
COLUMN_SPLIT = 2048
"""Columns that one sum over d takes; never a function of the batch."""
_REDUCE = {"ROWS": 64, "RANKS": 16, "COLUMNS": 128}
# Block sizes that spill on neither sm_80 nor sm_90; not tuned. fp32, which has no matrix instructions, holds
# its products in registers and takes few rows of a tile at a time for a gradient.
_SIXTEEN_BITS: dict[str, dict[str, Any]] = {
    "shrink": {"COLUMNS": 64, "num_warps": 4, "num_stages": 4},
    "expand": {"COLUMNS": 128, "num_warps": 4, "num_stages": 2},
    "read_dy": {
        "COLUMNS": 64, "GRADIENT_ROWS": TILE_ROWS, "GRADIENT_COLUMNS": 128, "num_warps": 4, "num_stages": 3,
    },
    "read_x": {"COLUMNS": 32, "ROWS": TILE_ROWS, "num_warps": 4, "num_stages": 3},
}  # fmt: skip
_FLOAT: dict[str, dict[str, Any]] = {
    "shrink": {"COLUMNS": 32, "num_warps": 4, "num_stages": 2},
    "expand": {"COLUMNS": 32, "num_warps": 8, "num_stages": 1},
    "read_dy": {
        "COLUMNS": 32, "GRADIENT_ROWS": 16, "GRADIENT_COLUMNS": 64, "num_warps": 8, "num_stages": 2,
    },
    "read_x": {"COLUMNS": 64, "ROWS": 16, "num_warps": 8, "num_stages": 2},
}  # fmt: skip


class TritonOperator:
    """See `interface.GpuOperator`."""

    saves_masks = False

    def __init__(self) -> None:
        self._plans = PlanCache(self.plan)

    def plan(self, segments: Tensor, sizes: PlanSizes) -> Plan:
        tables = plan_rows(rows_of(segments), sizes.rows, sizes.adapters)
        exact = replace(sizes, tiles=len(tables[0]), splits=len(tables[1]))
        rows = torch.tensor([row for table in tables for row in table], dtype=torch.int32, device="cpu").view(
            -1, 4
        )
        return Plan(exact, to_device(rows, segments.device))

    def forward(
        self, x: Tensor, layers: Sequence[Layer], adapters: Adapters, plan: PlanTensors, masks: bool = True
    ) -> tuple[list[Tensor], Saved]:
        (layer,), (a, b) = layers, adapters
        with _on(x):
            call = _Call(self._plans, x, a, plan)
            s = x.new_empty(len(x), a.max_rank)
            call.shrink(x, a, s)
            y = x.new_empty(len(x), b.width)
            call.expand(s, b, layer.bias, y)
        layer.product.add_matmul(y, x)
        return [y], (s.unsqueeze(0),)

    def backward(
        self,
        dys: Sequence[Tensor],
        x: Tensor,
        layers: Sequence[Layer],
        adapters: Adapters,
        saved: Saved,
        plan: PlanTensors,
        wanted: Wanted,
    ) -> Tensor | None:
        (layer,), (a, b), (dy,), (s,) = layers, adapters, dys, saved[0]
        need_dx, need_da, need_db = wanted
        need_ds = need_dx or need_da
        dx = x.new_empty(x.shape) if need_dx else None
        with _on(x):
            call = _Call(self._plans, x, a, plan)
            ds = torch.empty_like(s) if need_ds else None
            if need_ds or need_db:
                call.read_dy(dy, s, b, ds, need_db)
            if ds is not None:
                call.read_x(x, ds, a, dx, need_da)
        if dx is not None:
            layer.product.add_matmul_dx(dx, dy)
        return dx


class _Call:
    """The launches of one call."""

    def __init__(self, plans: PlanCache, x: Tensor, a: Factors, plan: PlanTensors) -> None:
        segments, scaling, *dropout = plan
        assert segments is not None
        assert scaling is not None
        self.scaling, self.rank = scaling, a.max_rank
        self.dropout = dropout if dropout[0] is not None else None
        self.plan = plans.get(segments, len(x), len(scaling))
        self.tiles, self.splits, self.groups = self.plan.tables()
        self.how = _FLOAT if x.dtype == torch.float32 else _SIXTEEN_BITS
        self.panels = triton.cdiv(self.rank, PANEL)

    def shrink(self, x: Tensor, a: Factors, s: Tensor) -> None:
        """Launches `s = scaling drop(x) A^T`, one column split at a time, and their sum."""
        out, splits = _partial_rows(s, a.width)
        shrink[len(self.tiles) * self.panels, splits](
            x, x.stride(0), a.first, a.table, self.tiles, self.scaling, *(self.dropout or (x, x, x)), out,
            s.numel(), a.width, self.rank, self.panels, COLUMN_SPLIT=COLUMN_SPLIT,
            DROP=self.dropout is not None, ROWS=TILE_ROWS, **_of(a), **_options(self.how["shrink"]),
        )  # fmt: skip
        self._sum_rows(out, s)

    def _sum_rows(self, partial: Tensor, out: Tensor) -> None:
        if partial is out:
            return
        rows, R = out.shape
        reduce_rows[triton.cdiv(rows, _REDUCE["ROWS"]), triton.cdiv(R, _REDUCE["RANKS"])](
            partial, out, rows, R, partial.shape[0],
            INTERPRETED=INTERPRETED, ROWS=_REDUCE["ROWS"], RANKS=_REDUCE["RANKS"],
        )  # fmt: skip

    def expand(self, s: Tensor, b: Factors, bias: Tensor | None, y: Tensor) -> None:
        """Launches `y = bias + s B^T`."""
        how = _options(self.how["expand"])
        expand[len(self.tiles), triton.cdiv(b.width, how["COLUMNS"])](
            s, b.first, b.table, self.tiles, s if bias is None else bias, y, b.width, self.rank,
            BIAS=bias is not None, ROWS=TILE_ROWS, **_of(b), **how,
        )  # fmt: skip

    def read_dy(self, dy: Tensor, s: Tensor, b: Factors, ds: Tensor | None, need_db: bool) -> None:
        """Launches the pass over dy: ds and the gradients of B, with their sums."""
        how = _options(self.how["read_dy"])
        out, splits = (s, 1) if ds is None else _partial_rows(ds, b.width)
        gradient, partial = self._gradient(b, need_db)
        blocks = triton.cdiv(b.width, how["GRADIENT_COLUMNS"])
        each = (SPLIT_TILES * splits * (ds is not None) + blocks * need_db) * self.panels
        read_dy[len(self.splits) * each,](
            dy, dy.stride(0), s, b.first, b.table, self.tiles, self.splits, self.scaling, out, gradient,
            partial, s.numel(), b.width, self.rank, splits, self.panels, blocks, SPLIT_TILES=SPLIT_TILES,
            COLUMN_SPLIT=COLUMN_SPLIT, DS=ds is not None, GRADIENT=need_db, ADD=b.add, ROWS=TILE_ROWS,
            **_of(b), **how,
        )  # fmt: skip
        if ds is not None:
            self._sum_rows(out, ds)
        self._sum_gradients(b, gradient, partial)

    def read_x(self, x: Tensor, ds: Tensor, a: Factors, dx: Tensor | None, need_da: bool) -> None:
        """Launches the pass over x: dx and the gradients of A, with their sums."""
        how = _options(self.how["read_x"])
        gradient, partial = self._gradient(a, need_da)
        read_x[triton.cdiv(a.width, how["COLUMNS"]) * self.panels, len(self.splits)](
            x, x.stride(0), ds, a.first, a.table, self.tiles, self.splits, *(self.dropout or (ds, ds, ds)),
            x if dx is None else dx, gradient, partial, a.width, self.rank, self.panels, DX=dx is not None,
            GRADIENT=need_da, DROP=self.dropout is not None, ADD=a.add, SPLIT_TILES=SPLIT_TILES,
            TILE=TILE_ROWS, **_of(a), **how,
        )  # fmt: skip
        self._sum_gradients(a, gradient, partial)

    def _gradient(self, factors: Factors, wanted: bool) -> tuple[Tensor, Tensor]:
        """Returns a gradient's memory, and fp32 `[slots, R, d]` for the adapters with several splits."""
        if not wanted:
            return self.scaling, self.scaling
        assert factors.into is not None
        shape = self.plan.sizes.slots, self.rank, factors.width
        return factors.into[0], self.scaling.new_empty(shape)

    def _sum_gradients(self, factors: Factors, gradient: Tensor, partial: Tensor) -> None:
        if gradient is partial or not len(partial):
            return
        blocks = triton.cdiv(factors.width, _REDUCE["COLUMNS"])
        reduce_gradients[blocks, len(self.groups), triton.cdiv(self.rank, _REDUCE["RANKS"])](
            partial, factors.table, self.groups, gradient, factors.width, self.rank, ADD=factors.add,
            RANKS=_REDUCE["RANKS"], COLUMNS=_REDUCE["COLUMNS"], **_of(factors),
        )  # fmt: skip


def _partial_rows(out: Tensor, width: int) -> tuple[Tensor, int]:
    """Returns memory of a product over `width` columns, and its splits: `out`, or fp32 sums of each split."""
    splits = max(1, triton.cdiv(width, COLUMN_SPLIT))
    return out if splits == 1 else out.new_empty(splits, *out.shape, dtype=torch.float32), splits


def _of(factors: Factors) -> dict[str, int | bool]:
    return {
        "ROWS_DENSE": factors.rows_dense,
        "ALIGNMENT": factors.alignment,
        "INTERPRETED": INTERPRETED,
    }


def _options(how: dict[str, Any]) -> dict[str, Any]:
    # enable_fp_fusion is set, since its default depends on Triton's version, and bits would too.
    return how | {"enable_fp_fusion": True}


def _on(tensor: Tensor) -> AbstractContextManager[None]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()  # type: ignore[return-value]
