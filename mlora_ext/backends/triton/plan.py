"""Makes the tile plan on the device; docs/gpu.md gives the tables and their meaning.

Letters: S segments, N adapters, K rows of `tiles`, M rows of `splits`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["S", "T", "N", "K", "M"])
def plan(
    segments_ptr,
    tiles_ptr,
    splits_ptr,
    groups_ptr,
    S,
    T,
    N,
    K,
    M,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs [0, S) make the tiles of one segment each, and of the gap before it.

    Program S makes the tiles behind the last segment, and unused tiles. The next N programs make the group
    and the splits of one adapter each. The last program makes the splits of rows without an adapter, and
    unused splits.
    """
    program = tl.program_id(0)
    if program <= S:
        _tiles(program, segments_ptr, tiles_ptr, S, T, N, K, TILE, BLOCK)
    else:
        _splits(program - S - 1, segments_ptr, splits_ptr, groups_ptr, S, T, N, M, TILE, SPLIT, BLOCK)


@triton.jit
def _segments(segments_ptr, first, S, N, BLOCK: tl.constexpr):
    """Returns index, begin, end, adapter of segments `first + [0, BLOCK)`; unused ones are (0, 0, -1)."""
    index = first + tl.arange(0, BLOCK)
    inside = (index >= 0) & (index < S)
    begin = tl.load(segments_ptr + 4 * index, mask=inside, other=0).to(tl.int32)
    end = tl.load(segments_ptr + 4 * index + 1, mask=inside, other=0).to(tl.int32)
    adapter = tl.load(segments_ptr + 4 * index + 2, mask=inside, other=-1).to(tl.int32)
    used = (adapter >= 0) & (adapter < N) & (end > begin)
    return index, tl.where(used, begin, 0), tl.where(used, end, 0), tl.where(used, adapter, -1)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _tiles(segment, segments_ptr, tiles_ptr, S, T, N, K, TILE: tl.constexpr, BLOCK: tl.constexpr):
    inside = segment < S
    begin = tl.load(segments_ptr + 4 * segment, mask=inside, other=0).to(tl.int32)
    end = tl.load(segments_ptr + 4 * segment + 1, mask=inside, other=0).to(tl.int32)
    adapter = tl.load(segments_ptr + 4 * segment + 2, mask=inside, other=-1).to(tl.int32)
    row0 = tl.load(segments_ptr + 4 * segment + 3, mask=inside, other=0)
    used = (adapter >= 0) & (adapter < N) & (end > begin)
    before = 0  # tiles of earlier adapters, and of earlier segments of this one
    all_tiles = 0
    gap_tiles = 0  # of the gaps before earlier segments
    last = 0  # end of the last segment before this one
    reached = 0  # by the blocks of segments seen so far
    for first in range(0, S, BLOCK):
        index, begins, ends, adapters = _segments(segments_ptr, first, S, N, BLOCK)
        _, _, previous, _ = _segments(segments_ptr, first - 1, S, N, BLOCK)
        tiles = tl.cdiv(ends - begins, TILE)
        earlier = (adapters < adapter) | ((adapters == adapter) & (index < segment))
        before += tl.sum(tl.where(earlier & (adapters >= 0), tiles, 0))
        all_tiles += tl.sum(tiles)
        lasts = tl.maximum(tl.associative_scan(previous, 0, _larger), reached)
        gaps = tl.where(adapters >= 0, tl.cdiv(begins - lasts, TILE), 0)
        gap_tiles += tl.sum(tl.where(index < segment, gaps, 0))
        last = tl.maximum(last, tl.max(tl.where(index < segment, ends, 0)))
        reached = tl.maximum(reached, tl.max(ends))
    if used:
        _write_tiles(tiles_ptr, before, begin, end, adapter, row0, TILE, BLOCK)
        _write_tiles(tiles_ptr, all_tiles + gap_tiles, last, begin, -1, row0 * 0, TILE, BLOCK)
    if segment == S:
        _write_tiles(tiles_ptr, all_tiles + gap_tiles, last, T, -1, row0 * 0, TILE, BLOCK)
        unused = all_tiles + gap_tiles + tl.cdiv(tl.maximum(T - last, 0), TILE)
        for first in range(unused, K, BLOCK):
            index = first + tl.arange(0, BLOCK)
            zero = tl.zeros([BLOCK], dtype=tl.int32)
            _write(tiles_ptr, index, index < K, zero, zero, zero - 1, zero)


@triton.jit
def _write_tiles(tiles_ptr, place, begin, end, adapter, row0, TILE: tl.constexpr, BLOCK: tl.constexpr):
    count = tl.cdiv(tl.maximum(end - begin, 0), TILE)
    for first in range(0, count, BLOCK):
        k = first + tl.arange(0, BLOCK)
        rows = tl.minimum(end - begin - k * TILE, TILE)
        philox_row = tl.where(adapter < 0, 0, row0 + k * TILE).to(tl.uint32).to(tl.int32, bitcast=True)
        adapters = tl.zeros([BLOCK], dtype=tl.int32) + adapter
        _write(tiles_ptr, place + k, k < count, begin + k * TILE, rows, adapters, philox_row)


@triton.jit
def _write(table_ptr, index, mask, c0, c1, c2, c3):
    tl.store(table_ptr + 4 * index, c0, mask=mask)
    tl.store(table_ptr + 4 * index + 1, c1, mask=mask)
    tl.store(table_ptr + 4 * index + 2, c2, mask=mask)
    tl.store(table_ptr + 4 * index + 3, c3, mask=mask)


@triton.jit
def _splits(
    adapter, segments_ptr, splits_ptr, groups_ptr, S, T, N, M,
    TILE: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    own = 0  # tiles of this adapter
    tile_begin = 0
    split_begin = 0
    slot_begin = 0
    for first_adapter in range(0, adapter + 1, BLOCK):
        who = first_adapter + tl.arange(0, BLOCK)
        count = tl.zeros([BLOCK], dtype=tl.int32)
        for first in range(0, S, BLOCK):
            _, begins, ends, adapters = _segments(segments_ptr, first, S, N, BLOCK)
            tiles = tl.cdiv(ends - begins, TILE)
            count += tl.sum(tl.where(who[:, None] == adapters[None, :], tiles[None, :], 0), axis=1)
        runs = tl.maximum(tl.cdiv(count, SPLIT), 1)
        earlier = who < adapter
        own += tl.sum(tl.where(who == adapter, count, 0))
        tile_begin += tl.sum(tl.where(earlier, count, 0))
        split_begin += tl.sum(tl.where(earlier, runs, 0))
        slot_begin += tl.sum(tl.where(earlier & (runs > 1), runs, 0))
    if adapter < N:
        runs = tl.maximum(tl.cdiv(own, SPLIT), 1)
        slots = tl.where(runs > 1, runs, 0)
        tl.store(groups_ptr + 4 * adapter, tile_begin)
        tl.store(groups_ptr + 4 * adapter + 1, tile_begin + own)
        tl.store(groups_ptr + 4 * adapter + 2, slot_begin)
        tl.store(groups_ptr + 4 * adapter + 3, slots)
        _write_splits(
            splits_ptr, split_begin, runs, tile_begin, tile_begin + own, adapter, slot_begin, runs > 1,
            SPLIT, BLOCK,
        )  # fmt: skip
    else:
        rest = _base_tiles(segments_ptr, S, T, N, TILE, BLOCK)
        runs = tl.cdiv(rest, SPLIT)
        _write_splits(
            splits_ptr, split_begin, runs, tile_begin, tile_begin + rest, -1, 0, False, SPLIT, BLOCK
        )
        for first in range(split_begin + runs, M, BLOCK):
            index = first + tl.arange(0, BLOCK)
            zero = tl.zeros([BLOCK], dtype=tl.int32)
            _write(splits_ptr, index, index < M, zero, zero, zero - 1, zero - 1)


@triton.jit
def _base_tiles(segments_ptr, S, T, N, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the number of tiles of rows without an adapter."""
    count = 0
    reached = 0
    for first in range(0, S, BLOCK):
        _, begins, ends, adapters = _segments(segments_ptr, first, S, N, BLOCK)
        _, _, previous, _ = _segments(segments_ptr, first - 1, S, N, BLOCK)
        lasts = tl.maximum(tl.associative_scan(previous, 0, _larger), reached)
        count += tl.sum(tl.where(adapters >= 0, tl.cdiv(begins - lasts, TILE), 0))
        reached = tl.maximum(reached, tl.max(ends))
    return count + tl.cdiv(tl.maximum(T - reached, 0), TILE)


@triton.jit
def _write_splits(
    splits_ptr, place, runs, tile_begin, tile_end, adapter, slot_begin, partial,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for first in range(0, runs, BLOCK):
        k = first + tl.arange(0, BLOCK)
        begins = tile_begin + k * SPLIT
        ends = tl.minimum(begins + SPLIT, tile_end)
        adapters = tl.zeros([BLOCK], dtype=tl.int32) + adapter
        _write(splits_ptr, place + k, k < runs, begins, ends, adapters, tl.where(partial, slot_begin + k, -1))
