"""The operator, forward: `s = scaling drop(x) A^T`, then `y = bias + s B^T` (mLoRA, Eq. 2).

Oracle: `ops/reference.py`. Letters: T rows, d, D and O columns, R largest rank, K tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import BUCKETS, PANEL, factor_of, in_bucket, low_rank_rows, shrink_tile, store_rows, tile_of
from .dropout import dropout_of


@triton.jit(do_not_specialize=["split_stride", "R", "panels"])
def shrink(
    rows_ptr, stride, factor_ptr, table_ptr, tiles_ptr, scaling_ptr, p_ptr, rng_ptr, layer_ptr, out_ptr,
    split_stride, width, R, panels,
    COLUMN_SPLIT: tl.constexpr, DROP: tl.constexpr, ROWS_DENSE: tl.constexpr, ALIGNMENT: tl.constexpr,
    INTERPRETED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (tile and panel of ranks; column split) writes its part of the split's `[T, R]`.

    Panels are neighbours in the launch: they find the rows of x in the cache.
    """
    split, place = tl.program_id(1).to(tl.int64), tl.program_id(0)
    first_rank, tile = place % panels * PANEL, place // panels
    if tl.load(tiles_ptr + 4 * tile + 1) > 0:
        row, rows, adapter, philox_row = tile_of(tiles_ptr, tile)
        # A tile without an adapter reads the tables of adapter 0, and uses nothing of them.
        who = tl.maximum(adapter, 0)
        offset, rank_stride, column_stride, rank = factor_of(table_ptr, who, ROWS_DENSE, ALIGNMENT)
        rank = tl.where(adapter >= 0, rank, 0)
        scale = tl.load(scaling_ptr + who)
        seed, step, layer, threshold = 0, 0, 0, 0
        if DROP:
            seed, step, layer, threshold, keep_scale = dropout_of(who, p_ptr, rng_ptr, layer_ptr)
            scale *= keep_scale
        begin = tl.program_id(1) * COLUMN_SPLIT
        end = tl.minimum(width, begin + COLUMN_SPLIT)
        for bucket in tl.static_range(BUCKETS):
            if in_bucket(rank, 16 << bucket):
                shrink_tile(
                    rows_ptr, stride, row, rows, width, begin, end,
                    factor_ptr, offset, rank_stride, column_stride, first_rank, rank, scale,
                    seed, step, layer, threshold, philox_row, out_ptr + split * split_stride, R,
                    DROP, INTERPRETED, ROWS, COLUMNS, 16 << bucket,
                )  # fmt: skip


@triton.jit(do_not_specialize=["R"])
def expand(
    s_ptr, factor_ptr, table_ptr, tiles_ptr, bias_ptr, y_ptr, width, R,
    BIAS: tl.constexpr, ROWS_DENSE: tl.constexpr, ALIGNMENT: tl.constexpr, INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (tile, block of columns) writes `[rows, COLUMNS]` of y."""
    tile, column = tl.program_id(0), tl.program_id(1) * COLUMNS
    if tl.load(tiles_ptr + 4 * tile + 1) > 0:
        row, rows, adapter, _ = tile_of(tiles_ptr, tile)
        who = tl.maximum(adapter, 0)
        offset, rank_stride, column_stride, rank = factor_of(table_ptr, who, ROWS_DENSE, ALIGNMENT)
        rank = tl.where(adapter >= 0, rank, 0)
        c = column + tl.arange(0, COLUMNS)
        bias = tl.zeros([COLUMNS], dtype=tl.float32)
        if BIAS:
            bias += tl.load(bias_ptr + c, mask=c < width, other=0.0).to(tl.float32)
        for bucket in tl.static_range(BUCKETS):
            if in_bucket(rank, 16 << bucket):
                sums = low_rank_rows(
                    s_ptr, row, rows, factor_ptr, offset, rank_stride, column_stride, rank, column, width, R,
                    INTERPRETED, ROWS, COLUMNS, 16 << bucket,
                )  # fmt: skip
                sums += bias[None, :]
                store_rows(y_ptr, width, row, rows, column, width, sums, INTERPRETED, ROWS, COLUMNS)
