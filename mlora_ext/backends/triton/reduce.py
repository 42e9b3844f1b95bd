"""Sums partial results in order: over column splits, and over the slots of an adapter's gradient."""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import factor_of, load_rows, narrow, store_rows
from .gradient import gradient_of


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
