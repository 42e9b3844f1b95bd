"""Backward's pass over dy: `ds = scaling dy B` and `dB = dy^T s` (mLoRA, Eq. 3).

Letters: T rows, O columns, R largest rank, M splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import BUCKETS, PANEL, factor_of, in_bucket, shrink_tile, tile_of
from .gradient import factor_gradient, split_of


@triton.jit(do_not_specialize=["split_stride", "R", "column_splits", "panels", "blocks"])
def read_dy(
    dy_ptr, stride, s_ptr, factor_ptr, table_ptr, tiles_ptr, splits_ptr, scaling_ptr,
    ds_ptr, gradient_ptr, partial_ptr, split_stride, width, R, column_splits, panels, blocks,
    SPLIT_TILES: tl.constexpr, COLUMN_SPLIT: tl.constexpr,
    DS: tl.constexpr, GRADIENT: tl.constexpr, ADD: tl.constexpr,
    ROWS_DENSE: tl.constexpr, ALIGNMENT: tl.constexpr, INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GRADIENT_ROWS: tl.constexpr, GRADIENT_COLUMNS: tl.constexpr,
):  # fmt: skip
    """For each split, neighbouring programs make ds of its tiles and dB of its rows.

    They need nothing of each other, and find each other's rows of dy in the cache.
    """
    of_ds = SPLIT_TILES * column_splits * panels if DS else 0
    each = of_ds + (blocks * panels if GRADIENT else 0)
    split, place = tl.program_id(0) // each, tl.program_id(0) % each
    tile = tl.load(splits_ptr + 4 * split) + place // (column_splits * panels)
    first_rank = place % panels * PANEL
    if place < of_ds:
        if tile < tl.load(splits_ptr + 4 * split + 1):
            column_split = place // panels % column_splits
            begin = column_split * COLUMN_SPLIT
            row, rows, adapter, philox_row = tile_of(tiles_ptr, tile)
            who = tl.maximum(adapter, 0)
            offset, rank_stride, column_stride, rank = factor_of(table_ptr, who, ROWS_DENSE, ALIGNMENT)
            rank = tl.where(adapter >= 0, rank, 0)
            for bucket in tl.static_range(BUCKETS):
                if in_bucket(rank, 16 << bucket):
                    shrink_tile(
                        dy_ptr, stride, row, rows, width, begin, tl.minimum(width, begin + COLUMN_SPLIT),
                        factor_ptr, offset, rank_stride, column_stride, first_rank, rank,
                        tl.load(scaling_ptr + who), 0, 0, 0, 0, philox_row,
                        ds_ptr + column_split.to(tl.int64) * split_stride, R,
                        False, INTERPRETED, ROWS, COLUMNS, 16 << bucket,
                    )  # fmt: skip
    elif tl.load(splits_ptr + 4 * split + 2) >= 0:
        tile_begin, tile_end, adapter, slot = split_of(splits_ptr, split)
        _, _, _, rank = factor_of(table_ptr, adapter, ROWS_DENSE, ALIGNMENT)
        column = (place - of_ds) // panels * GRADIENT_COLUMNS
        if first_rank < rank:
            for bucket in tl.static_range(BUCKETS):
                if in_bucket(rank, 16 << bucket):
                    factor_gradient(
                        tile_begin, tile_end, adapter, slot, column, first_rank,
                        dy_ptr, stride, s_ptr, R, factor_ptr, table_ptr, tiles_ptr,
                        scaling_ptr, scaling_ptr, scaling_ptr, dy_ptr, gradient_ptr, partial_ptr, width,
                        False, GRADIENT, False, ADD, ROWS_DENSE, ALIGNMENT, INTERPRETED,
                        SPLIT_TILES, ROWS, GRADIENT_ROWS, GRADIENT_COLUMNS, 16 << bucket,
                    )  # fmt: skip
