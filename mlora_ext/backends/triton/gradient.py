"""The gradient of a factor over one split of its adapter's tiles; makes dx too, where x is read anyway.

`dF[j, c] = sum_t s[t, j] drop(x)[t, c]` and `dx = drop'(ds F)` (mLoRA, Eq. 3-4). Letters: T rows, d columns,
R largest rank.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import (
    PANEL,
    factor_of,
    gradient_of,
    load_factor,
    load_rows,
    low_rank_rows,
    narrow,
    product,
    store_rows,
    tile_of,
)
from .dropout import dropout_of, keep_mask


@triton.jit
def split_of(splits_ptr, split):
    """Returns `(tile_begin, tile_end, adapter, slot)` of one split."""
    tile_begin = tl.load(splits_ptr + 4 * split)
    tile_end = tl.load(splits_ptr + 4 * split + 1)
    adapter = tl.load(splits_ptr + 4 * split + 2)
    slot = tl.load(splits_ptr + 4 * split + 3)
    return tile_begin, tile_end, adapter, slot


@triton.jit
def zero_tiles(
    tile_begin, tile_end, tiles_ptr, out_ptr, column, width,
    INTERPRETED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Stores zeros in the rows of these tiles, which have no adapter."""
    zeros = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for tile in range(tile_begin, tile_end):
        row, rows, _, _ = tile_of(tiles_ptr, tile)
        store_rows(out_ptr, width, row, rows, column, width, zeros, INTERPRETED, ROWS, COLUMNS)


@triton.jit
def factor_gradient(
    tile_begin, tile_end, adapter, slot, column, first_rank,
    rows_ptr, stride, s_ptr, R, factor_ptr, table_ptr, tiles_ptr, p_ptr, rng_ptr, layer_ptr,
    dx_ptr, gradient_ptr, partial_ptr, width,
    DX: tl.constexpr, GRADIENT: tl.constexpr, DROP: tl.constexpr, ADD: tl.constexpr,
    ROWS_DENSE: tl.constexpr, ALIGNMENT: tl.constexpr, INTERPRETED: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Stores `[RANKS, COLUMNS]` of one adapter's gradient, made from ROWS rows of a tile at a time.

    With DX, the first panel also stores `[rows, COLUMNS]` of dx.
    """
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    offset, rank_stride, column_stride, rank = factor_of(table_ptr, adapter, ROWS_DENSE, ALIGNMENT)
    sums = tl.zeros([RANKS, COLUMNS], dtype=tl.float32)
    keep_scale = 1.0
    if DROP:
        seed, step, layer, threshold, keep_scale = dropout_of(adapter, p_ptr, rng_ptr, layer_ptr)
    RESIDENT: tl.constexpr = RANKS < PANEL and dtype != tl.float32
    if DX and RESIDENT:
        f = load_factor(
            factor_ptr, offset, rank_stride, column_stride, first_rank, rank, column, width, dtype,
            INTERPRETED, RANKS, COLUMNS,
        )  # fmt: skip
    PARTS: tl.constexpr = TILE // ROWS
    # Loaded before the loop: a load that other loads wait for would take up stages of its pipeline.
    k = tl.arange(0, TILES)
    inside = tile_begin + k < tile_end
    tile_row = tl.load(tiles_ptr + 4 * (tile_begin + k), mask=inside, other=0)
    tile_rows = tl.load(tiles_ptr + 4 * (tile_begin + k) + 1, mask=inside, other=0)
    tile_philox = tl.load(tiles_ptr + 4 * (tile_begin + k) + 3, mask=inside, other=0)
    for part in range(0, (tile_end - tile_begin) * PARTS):
        here, skipped = k == part // PARTS, part % PARTS * ROWS
        row = tl.sum(tl.where(here, tile_row, 0)).to(tl.int64) + skipped
        rows = tl.sum(tl.where(here, tile_rows, 0)) - skipped
        philox_row = tl.sum(tl.where(here, tile_philox, 0)) + skipped
        s = load_rows(s_ptr, R, row, rows, first_rank, R, ROWS, RANKS)
        if DROP:
            keep = keep_mask(seed, step, layer, threshold, philox_row, column, ROWS, COLUMNS)
        if GRADIENT:
            x = load_rows(rows_ptr, stride, row, rows, column, width, ROWS, COLUMNS)
            if DROP:
                x = tl.where(keep, x, 0.0).to(dtype)
            sums = product(tl.trans(s), x, sums, INTERPRETED)
        if DX:
            dx = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
            if RESIDENT:
                dx = product(s, f, dx, INTERPRETED)
            elif first_rank == 0:
                dx = low_rank_rows(
                    s_ptr, row, rows, factor_ptr, offset, rank_stride, column_stride, rank, column, width, R,
                    INTERPRETED, ROWS, COLUMNS, RANKS,
                )  # fmt: skip
            if DROP:
                dx = tl.where(keep, dx * keep_scale, 0.0)
            if first_rank == 0:
                store_rows(dx_ptr, width, row, rows, column, width, dx, INTERPRETED, ROWS, COLUMNS)
    if GRADIENT:
        sums *= keep_scale
        j = first_rank + tl.arange(0, RANKS)
        c = column + tl.arange(0, COLUMNS)
        inside = (j < rank)[:, None] & (c < width)[None, :]
        if slot < 0:
            start, grad_rank, grad_column = gradient_of(table_ptr, adapter, ROWS_DENSE, ALIGNMENT)
            finals = gradient_ptr + start + j[:, None] * grad_rank + c[None, :] * grad_column
            if ADD:
                sums += tl.load(finals, mask=inside, other=0.0).to(tl.float32)
            tl.store(finals, narrow(sums, gradient_ptr.dtype.element_ty, INTERPRETED), mask=inside)
        else:
            partials = partial_ptr + (slot * R + j.to(tl.int64))[:, None] * width + c[None, :]
            tl.store(partials, sums, mask=inside)
