"""Loads, stores and multiplies the blocks that all kernels are made of.

Letters: T rows, d columns of a factor (D or O), R ranks of a panel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dropout import keep_mask

PANEL = tl.constexpr(64)
"""Most ranks of one program; adapters of larger rank are cut into panels."""
BUCKETS = tl.constexpr(3)
"""Blocks of 16, 32 or 64 ranks: every kernel holds all, so that a new mixture of ranks compiles nothing."""


@triton.jit
def in_bucket(rank, RANKS: tl.constexpr):
    """Whether blocks of RANKS ranks (16, 32 or 64) serve an adapter of this rank.

    Only its own rank decides, so that its sums have the same order whatever its batch-mates' ranks are.
    """
    low: tl.constexpr = RANKS // 2 if RANKS > 16 else -1
    high: tl.constexpr = RANKS if RANKS < PANEL else 2**30
    return (rank > low) & (rank <= high)


@triton.jit
def tile_of(tiles_ptr, tile):
    """Returns `(row, rows, adapter, philox_row)` of one tile."""
    row = tl.load(tiles_ptr + 4 * tile).to(tl.int64)
    rows = tl.load(tiles_ptr + 4 * tile + 1)
    adapter = tl.load(tiles_ptr + 4 * tile + 2)
    philox_row = tl.load(tiles_ptr + 4 * tile + 3)
    return row, rows, adapter, philox_row


@triton.jit
def factor_of(table_ptr, adapter, ROWS_DENSE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Returns `(offset, rank_stride, column_stride, rank)` of one adapter's factor."""
    offset = tl.multiple_of(tl.load(table_ptr + 8 * adapter), ALIGNMENT)
    rank_stride = tl.multiple_of(tl.load(table_ptr + 8 * adapter + 1), ALIGNMENT)
    column_stride = tl.load(table_ptr + 8 * adapter + 2) if not ROWS_DENSE else 1
    rank = tl.load(table_ptr + 8 * adapter + 3).to(tl.int32)
    return offset, rank_stride, column_stride, rank


@triton.jit
def gradient_of(table_ptr, adapter, ROWS_DENSE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Returns `(offset, rank_stride, column_stride)` of one adapter's gradient."""
    offset = tl.multiple_of(tl.load(table_ptr + 8 * adapter + 4), ALIGNMENT)
    rank_stride = tl.multiple_of(tl.load(table_ptr + 8 * adapter + 5), ALIGNMENT)
    column_stride = tl.load(table_ptr + 8 * adapter + 6) if not ROWS_DENSE else 1
    return offset, rank_stride, column_stride


@triton.jit
def narrow(values, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Returns fp32 values rounded to `dtype`, to nearest even.

    Triton's interpreter truncates when it makes bf16. There, and only there, the bits are rounded here.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.float32).to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        values = tl.where(values == values, bits.to(tl.float32, bitcast=True), values)
    return values.to(dtype)


@triton.jit
def load_rows(rows_ptr, stride, row, rows, column, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns `[ROWS, COLUMNS]` of a matrix; zeros beyond the tile's rows and the matrix's columns."""
    m = tl.arange(0, ROWS)
    c = column + tl.arange(0, COLUMNS)
    pointers = rows_ptr + (row + m)[:, None] * stride + c[None, :]
    return tl.load(pointers, mask=(m < rows)[:, None] & (c < width)[None, :], other=0.0)


@triton.jit
def store_rows(
    out_ptr, stride, row, rows, column, width, values,
    INTERPRETED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Stores `[ROWS, COLUMNS]` of a matrix; the counterpart of `load_rows`."""
    m = tl.arange(0, ROWS)
    c = column + tl.arange(0, COLUMNS)
    pointers = out_ptr + (row + m)[:, None] * stride + c[None, :]
    values = narrow(values, out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(pointers, values, mask=(m < rows)[:, None] & (c < width)[None, :])


@triton.jit
def load_factor(
    factor_ptr, offset, rank_stride, column_stride, first_rank, rank, column, width, dtype: tl.constexpr,
    INTERPRETED: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Returns `[RANKS, COLUMNS]` of a factor in the dtype of the rows; zeros beyond its rank and width."""
    j = first_rank + tl.arange(0, RANKS)
    c = column + tl.arange(0, COLUMNS)
    pointers = factor_ptr + offset + j[:, None] * rank_stride + c[None, :] * column_stride
    mask = (j < rank)[:, None] & (c < width)[None, :]
    return narrow(tl.load(pointers, mask=mask, other=0.0), dtype, INTERPRETED)


@triton.jit
def product(a, b, sums, INTERPRETED: tl.constexpr):
    """Returns `sums + a b` in fp32.

    Triton's interpreter multiplies bit patterns of bf16. There, and only there, operands are widened first.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    elif a.dtype == tl.float32:
        # One chain of multiply-adds over all rows would lose digits, so each block is summed by itself. The
        # option says nothing of fp32, but it keeps the compiler from making one chain of both sums.
        return sums + tl.dot(a, b, input_precision="ieee", max_num_imprecise_acc=1)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def shrink_tile(
    rows_ptr, stride, row, rows, width, column_begin, column_end,
    factor_ptr, offset, rank_stride, column_stride, first_rank, rank, scale,
    seed, step, layer, threshold, philox_row, out_ptr, R,
    DROP: tl.constexpr, INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Stores `scale drop(rows) F^T` over columns `[column_begin, column_end)` in a panel of `out [T, R]`.

    Ranks of the panel beyond RANKS become zero; without an adapter (rank 0) all ranks do.
    """
    sums = tl.zeros([ROWS, RANKS], dtype=tl.float32)
    for column in range(column_begin, tl.where(first_rank < rank, column_end, column_begin), COLUMNS):
        x = load_rows(rows_ptr, stride, row, rows, column, width, ROWS, COLUMNS)
        if DROP:
            keep = keep_mask(seed, step, layer, threshold, philox_row, column, ROWS, COLUMNS)
            x = tl.where(keep, x, 0.0).to(rows_ptr.dtype.element_ty)
        f = load_factor(
            factor_ptr, offset, rank_stride, column_stride, first_rank, rank, column, width,
            rows_ptr.dtype.element_ty, INTERPRETED, RANKS, COLUMNS,
        )  # fmt: skip
        sums = product(x, tl.trans(f), sums, INTERPRETED)
    # Selects, since an infinite x times the zeros of a missing rank is NaN.
    j = first_rank + tl.arange(0, RANKS)
    values = tl.where((j < rank)[None, :], scale * sums, 0.0)
    store_rows(out_ptr, R, row, rows, first_rank, R, values, INTERPRETED, ROWS, RANKS)
    for rest in range(first_rank + RANKS, tl.minimum(R, first_rank + PANEL), 16):
        zeros = tl.zeros([ROWS, 16], dtype=tl.float32)
        store_rows(out_ptr, R, row, rows, rest, R, zeros, INTERPRETED, ROWS, 16)


@triton.jit
def low_rank_rows(
    s_ptr, row, rows, factor_ptr, offset, rank_stride, column_stride, rank, column, width, R,
    INTERPRETED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Returns `s F` of one tile and block of columns: `[ROWS, COLUMNS]` fp32, `RANKS` ranks at a time.

    fp32 takes 16 ranks: without tensor cores, a product holds all its ranks in registers. s is read up to R,
    beyond the adapter's rank: s is zero there, and 16-byte loads need no mask.
    """
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    step: tl.constexpr = 16 if s_ptr.dtype.element_ty == tl.float32 else RANKS
    for first_rank in range(0, rank, step):
        s = load_rows(s_ptr, R, row, rows, first_rank, R, ROWS, step)
        f = load_factor(
            factor_ptr, offset, rank_stride, column_stride, first_rank, rank, column, width,
            s_ptr.dtype.element_ty, INTERPRETED, step, COLUMNS,
        )  # fmt: skip
        sums = product(s, f, sums, INTERPRETED)
    return sums
