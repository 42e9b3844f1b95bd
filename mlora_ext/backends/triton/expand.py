"""`y = bias + s B^T`, written before the base GEMM adds to it (mLoRA, Eq. 2).

Letters: T rows, O columns, R largest rank, K tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import BUCKETS, factor_of, in_bucket, low_rank_rows, store_rows, tile_of


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
