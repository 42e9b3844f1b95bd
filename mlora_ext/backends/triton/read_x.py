"""Backward's pass over x: `dA = ds^T drop(x)` and `dx = drop'(ds A)`, under one mask (mLoRA, Eq. 4).

Letters: T rows, D columns, R largest rank, M splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import BUCKETS, PANEL, factor_of, in_bucket
from .gradient import factor_gradient, split_of, zero_tiles


@triton.jit(do_not_specialize=["R", "panels"])
def read_x(
    x_ptr, stride, ds_ptr, factor_ptr, table_ptr, tiles_ptr, splits_ptr, p_ptr, rng_ptr, layer_ptr,
    dx_ptr, gradient_ptr, partial_ptr, width, R, panels,
    DX: tl.constexpr, GRADIENT: tl.constexpr, DROP: tl.constexpr, ADD: tl.constexpr,
    ROWS_DENSE: tl.constexpr, ALIGNMENT: tl.constexpr, INTERPRETED: tl.constexpr,
    SPLIT_TILES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (block of columns and panel of ranks, split) makes dA and dx, to which the base GEMM adds."""
    column, first_rank = tl.program_id(0) // panels * COLUMNS, tl.program_id(0) % panels * PANEL
    split = tl.program_id(1)
    if tl.load(splits_ptr + 4 * split + 2) >= 0:
        tile_begin, tile_end, adapter, slot = split_of(splits_ptr, split)
        _, _, _, rank = factor_of(table_ptr, adapter, ROWS_DENSE, ALIGNMENT)
        if first_rank < rank:
            for bucket in tl.static_range(BUCKETS):
                if in_bucket(rank, 16 << bucket):
                    factor_gradient(
                        tile_begin, tile_end, adapter, slot, column, first_rank,
                        x_ptr, stride, ds_ptr, R, factor_ptr, table_ptr, tiles_ptr, p_ptr, rng_ptr,
                        layer_ptr, dx_ptr, gradient_ptr, partial_ptr, width,
                        DX, GRADIENT, DROP, ADD, ROWS_DENSE, ALIGNMENT, INTERPRETED,
                        SPLIT_TILES, TILE, ROWS, COLUMNS, 16 << bucket,
                    )  # fmt: skip
    elif DX:
        tile_begin, tile_end = tl.load(splits_ptr + 4 * split), tl.load(splits_ptr + 4 * split + 1)
        if (first_rank == 0) & (tile_begin < tile_end):
            zero_tiles(tile_begin, tile_end, tiles_ptr, dx_ptr, column, width, INTERPRETED, TILE, COLUMNS)
