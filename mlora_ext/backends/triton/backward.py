"""The operator, backward: a pass over dy, one over x, and sums of parts in order (mLoRA, Eq. 3-4).

Oracle: autograd through `ops/reference.py`. Letters: T rows, d, D and O columns, R largest rank, M splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import (
    BUCKETS,
    PANEL,
    factor_of,
    gradient_of,
    in_bucket,
    load_factor,
    load_rows,
    low_rank_rows,
    narrow,
    product,
    shrink_tile,
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


@triton.jit(do_not_specialize=["rows", "R", "splits"])
def reduce_rows(
    partial_ptr, out_ptr, rows, R, splits,
    INTERPRETED: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Program (block of rows, block of ranks) sums `partial [splits, rows, R]` over splits, in order."""
    row, rank = tl.program_id(0) * ROWS, tl.program_id(1) * RANKS
    sums = tl.zeros([ROWS, RANKS], dtype=tl.float32)
    for split in range(splits):
        begin = split * rows.to(tl.int64) + row
        sums += load_rows(partial_ptr, R, begin, rows - row, rank, R, ROWS, RANKS)
    begin = row + tl.zeros([], dtype=tl.int64)
    store_rows(out_ptr, R, begin, rows - row, rank, R, sums, INTERPRETED, ROWS, RANKS)


@triton.jit(do_not_specialize=["R"])
def reduce_gradients(
    partial_ptr, table_ptr, groups_ptr, gradient_ptr, width, R,
    ADD: tl.constexpr, ROWS_DENSE: tl.constexpr, ALIGNMENT: tl.constexpr, INTERPRETED: tl.constexpr,
    RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, adapter, block of ranks) sums the adapter's slots, in order."""
    adapter = tl.program_id(1)
    begin = tl.load(groups_ptr + 4 * adapter + 2)
    count = tl.load(groups_ptr + 4 * adapter + 3)
    _, _, _, rank = factor_of(table_ptr, adapter, ROWS_DENSE, ALIGNMENT)
    first_rank = tl.program_id(2) * RANKS
    if (count > 0) & (first_rank < rank):
        j = first_rank + tl.arange(0, RANKS)
        c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (j < rank)[:, None] & (c < width)[None, :]
        sums = tl.zeros([RANKS, COLUMNS], dtype=tl.float32)
        for slot in range(begin, begin + count):
            places = partial_ptr + (slot * R + j.to(tl.int64))[:, None] * width + c[None, :]
            sums += tl.load(places, mask=inside, other=0.0)
        start, grad_rank, grad_column = gradient_of(table_ptr, adapter, ROWS_DENSE, ALIGNMENT)
        places = gradient_ptr + start + j[:, None] * grad_rank + c[None, :] * grad_column
        if ADD:
            sums += tl.load(places, mask=inside, other=0.0).to(tl.float32)
        tl.store(places, narrow(sums, gradient_ptr.dtype.element_ty, INTERPRETED), mask=inside)
