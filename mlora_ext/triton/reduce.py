"""Ordered sums of partial results: over column splits, and over the slots of an adapter's gradient."""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import factor_of, narrow
from .gradient import gradient_of


@triton.jit(do_not_specialize=["numbers"])
def reduce_rows(partial_ptr, out_ptr, numbers, splits, INTERPRETED: tl.constexpr, BLOCK: tl.constexpr):
    """`out = sum over splits, in order, of partial [splits, numbers]`."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numbers
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for split in range(splits):
        sums += tl.load(partial_ptr + split * numbers.to(tl.int64) + index, mask=inside, other=0.0)
    tl.store(out_ptr + index, narrow(sums, out_ptr.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit(do_not_specialize=["slots", "N"])
def reduce_gradients(
    partial_ptr, table_ptr, groups_ptr, gradient_ptr, slots, width, R, N,
    ADD: tl.constexpr, ROWS_DENSE: tl.constexpr, ALIGNMENT: tl.constexpr, INTERPRETED: tl.constexpr,
    RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, adapter of a layer, block of ranks): the sum over the adapter's slots, in
    order. Each layer has `slots` of them."""
    factor = tl.program_id(1)
    adapter = factor % N
    begin = factor // N * slots + tl.load(groups_ptr + 4 * adapter + 2)
    count = tl.load(groups_ptr + 4 * adapter + 3)
    _, _, _, rank = factor_of(table_ptr, factor, ROWS_DENSE, ALIGNMENT)
    first_rank = tl.program_id(2) * RANKS
    if (count > 0) & (first_rank < rank):
        j = first_rank + tl.arange(0, RANKS)
        c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (j < rank)[:, None] & (c < width)[None, :]
        sums = tl.zeros([RANKS, COLUMNS], dtype=tl.float32)
        for slot in range(begin, begin + count):
            places = partial_ptr + (slot * R + j.to(tl.int64))[:, None] * width + c[None, :]
            sums += tl.load(places, mask=inside, other=0.0)
        start, grad_rank, grad_column = gradient_of(table_ptr, factor, ROWS_DENSE, ALIGNMENT)
        places = gradient_ptr + start + j[:, None] * grad_rank + c[None, :] * grad_column
        if ADD:
            sums += tl.load(places, mask=inside, other=0.0).to(tl.float32)
        tl.store(places, narrow(sums, gradient_ptr.dtype.element_ty, INTERPRETED), mask=inside)
