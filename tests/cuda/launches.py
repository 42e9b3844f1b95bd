"""The launches of docs/gpu.md in their order, around tensors that are full of NaN before.

Letters: T rows, D = d_in, O = d_out, R largest rank, S segments, N adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

OPS = torch.ops.mlora_ext
TILE_ROWS, SPLIT_TILES, COLUMN_SPLIT = 64, 16, 2048
Dropout = tuple[Tensor | None, Tensor | None, Tensor | None]


def ceil_div(value: int, unit: int) -> int:
    return -(-value // unit)


def nan(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


@dataclass
class Plan:
    tiles: Tensor
    splits: Tensor
    groups: Tensor
    slots: int

    @classmethod
    def of(cls, segments: Tensor, rows: int, adapters: int) -> Plan:
        tiles = ceil_div(rows, TILE_ROWS) + 2 * len(segments) + 1
        splits = ceil_div(tiles, SPLIT_TILES) + adapters + 1
        tables = [torch.full((n, 4), -12345, dtype=torch.int32) for n in (tiles, splits, adapters)]
        OPS.cuda_plan(segments, rows, *tables)
        return cls(*tables, ceil_div(ceil_div(rows, TILE_ROWS) + len(segments), 8))


class Factor:
    """One factor of all adapters, given as matrices `[r, d]` of any strides, with its gradients."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        matrices = [matrix.detach() for matrix in matrices]
        self.first, self.d = matrices[0], matrices[0].shape[1]
        rows, end = [], 0
        self.views: list[tuple[int, int]] = []
        for matrix in matrices:
            offset = matrix.data_ptr() - self.first.data_ptr()
            rank = matrix.shape[0]
            rows.append(
                (offset // matrix.element_size(), *matrix.stride(), rank, end, self.d, 1, 0),
            )
            self.views.append((end, rank))
            end += rank * self.d
        self.table = torch.tensor(rows, dtype=torch.int64)
        self.gradient = nan(end, dtype=self.first.dtype)
        self.matrices = matrices

    @property
    def rank(self) -> int:
        return max(rank for _, rank in self.views)

    def gradients(self) -> list[Tensor]:
        return [self.gradient[end : end + rank * self.d].view(rank, self.d) for end, rank in self.views]


def shrunk_like(rows: Tensor, rank: int) -> Tensor:
    splits = ceil_div(rows.shape[1], COLUMN_SPLIT)
    if splits == 1:
        return nan(len(rows), rank, dtype=rows.dtype)
    return nan(splits, len(rows), rank, dtype=torch.float32)


def reduced(shrunk: Tensor, dtype: torch.dtype) -> Tensor:
    if shrunk.dim() == 2:
        return shrunk
    out = nan(*shrunk.shape[1:], dtype=dtype)
    OPS.cuda_reduce_rows(shrunk, out)
    return out


def forward(
    x: Tensor,
    bias: Tensor | None,
    a: Factor,
    b: Factor,
    plan: Plan,
    scaling: Tensor,
    drop: Dropout,
) -> tuple[Tensor, Tensor]:
    """The low-rank part of y with the bias, and s."""
    s = shrunk_like(x, a.rank)
    OPS.cuda_shrink(x, a.first, a.table, plan.tiles, scaling, *drop, s)
    s = reduced(s, x.dtype)
    y = nan(len(x), b.d, dtype=x.dtype)
    OPS.cuda_expand(s, b.first, b.table, plan.tiles, bias, y)
    return y, s


def backward(
    dy: Tensor,
    x: Tensor,
    s: Tensor,
    a: Factor,
    b: Factor,
    plan: Plan,
    scaling: Tensor,
    drop: Dropout,
    need_dx: bool = True,
    need_da: bool = True,
    need_db: bool = True,
) -> Tensor:
    """The low-rank part of dx; gradients of the factors go to their buffers."""
    ds = shrunk_like(dy, a.rank) if need_dx or need_da else dy.new_empty(0)
    partial_b = nan(plan.slots if need_db else 0, a.rank, b.d, dtype=torch.float32)
    OPS.cuda_read_dy(
        dy, s, b.first, b.table, plan.tiles, plan.splits, scaling, ds.numel() > 0, need_db, False, ds,
        b.gradient, partial_b,
    )  # fmt: skip
    dx = nan(len(x), x.shape[1], dtype=x.dtype) if need_dx else x.new_empty(0)
    if need_dx or need_da:
        partial_a = nan(plan.slots if need_da else 0, a.rank, a.d, dtype=torch.float32)
        OPS.cuda_read_x(
            x, reduced(ds, dy.dtype), a.first, a.table, plan.tiles, plan.splits, *drop, need_dx, need_da,
            False, False, dx, a.gradient, partial_a,
        )  # fmt: skip
        if need_da:
            OPS.cuda_reduce_gradients(partial_a, a.table, plan.groups, a.d, False, a.gradient)
    if need_db:
        OPS.cuda_reduce_gradients(partial_b, b.table, plan.groups, b.d, False, b.gradient)
    return dx
