"""The plan's tables against a plain Python reading of docs/gpu.md."""

import random

import emulated
import pytest
import torch
from launches import Plan

import mlora_ext as mx

pytestmark = pytest.mark.skipif(bool(emulated.missing()), reason=f"the emulator {emulated.missing()}")
Row = tuple[int, int, int, int]


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    emulated.load()


def cut(begin: int, end: int, adapter: int, row0: int) -> list[Row]:
    """Tiles of rows [begin, end)."""
    tiles = []
    for row in range(begin, end, 64):
        philox_row = (row0 + row - begin) % 2**32
        signed = philox_row - 2**32 if philox_row >= 2**31 else philox_row
        tiles.append((row, min(64, end - row), adapter, 0 if adapter < 0 else signed))
    return tiles


def expected(segments: list[Row], rows: int, adapters: int) -> tuple[list[Row], list[Row], list[Row]]:
    served = [s for s in segments if s[2] >= 0 and s[0] < s[1]]
    tiles, splits, groups, slots = [], [], [], 0

    def runs(first: int, adapter: int) -> list[Row]:
        return [(i, min(i + 16, len(tiles)), adapter, -1) for i in range(first, len(tiles), 16)]

    for adapter in range(adapters):
        first = len(tiles)
        for begin, end, owner, row0 in served:
            if owner == adapter:
                tiles += cut(begin, end, adapter, row0)
        mine = runs(first, adapter) or [(first, first, adapter, -1)]
        count = len(mine) if len(mine) > 1 else 0
        splits += [(b, e, a, slots + i if count else -1) for i, (b, e, a, _) in enumerate(mine)]
        groups.append((first, len(tiles), slots, count))
        slots += count
    first, cursor = len(tiles), 0
    for begin, end, *_ in [*served, (rows, rows, 0, 0)]:
        tiles += cut(cursor, begin, -1, 0)
        cursor = end
    return tiles, splits + runs(first, -1), groups


def check(layout: mx.SegmentLayout, adapters: int) -> None:
    table = layout.table()
    plan = Plan.of(table, layout.total_rows, adapters)
    tiles, splits, groups = expected([tuple(row) for row in table.tolist()], layout.total_rows, adapters)
    assert len(tiles) <= len(plan.tiles)
    assert len(splits) <= len(plan.splits)
    assert plan.tiles.tolist() == [list(t) for t in tiles] + [[0, 0, -1, 0]] * (len(plan.tiles) - len(tiles))
    unused = [[0, 0, -1, -1]] * (len(plan.splits) - len(splits))
    assert plan.splits.tolist() == [list(s) for s in splits] + unused
    assert plan.groups.tolist() == [list(g) for g in groups]
    assert sum(g[3] for g in groups) <= plan.slots
    covered = [row for first, count, *_ in tiles for row in range(first, first + count)]
    assert sorted(covered) == list(range(layout.total_rows)), "each row lies in one tile"


def test_random_layouts() -> None:
    draw = random.Random(torch.initial_seed())
    for _ in range(150):
        count = draw.choice([0, 1, 3, 9, 63, 70])
        adapters = draw.choice([1, 2, 5, 40])
        longest = draw.choice([3, 130, 700]) if count < 20 else 90
        lengths = [draw.choice([0, 1, 63, 64, 65, draw.randint(0, longest)]) for _ in range(count)]
        owners = [draw.randint(-1, adapters - 1) for _ in range(count)]
        row0 = [draw.choice([0, 5, 2**32 - 4, 2**31 - 1, 3 * 2**20]) for _ in range(count)]
        check(mx.SegmentLayout.from_lengths(lengths, owners, row0), adapters)


def test_long_segments() -> None:
    check(mx.SegmentLayout.from_lengths([1024, 1025, 5000, 17, 4096], [0, 1, 0, 3, -1]), 5)


def test_rows_in_no_segment() -> None:
    """Rows beyond and between the segments, and an adapter that is not there."""
    table = torch.tensor([[70, 90, 1, 7], [0, 0, -1, 0], [100, 300, 9, 0], [310, 311, 0, 4]])
    plan = Plan.of(table, 400, 2)
    tiles, splits, groups = expected([(70, 90, 1, 7), (310, 311, 0, 4)], 400, 2)
    assert plan.tiles[: len(tiles)].tolist() == [list(t) for t in tiles]
    assert plan.splits[: len(splits)].tolist() == [list(s) for s in splits]
    assert plan.groups.tolist() == [list(g) for g in groups]


def test_tables_that_are_too_small_are_refused() -> None:
    table = mx.SegmentLayout.from_lengths([10]).table()
    tables = [torch.zeros(n, 4, dtype=torch.int32) for n in (129, 10, 1)]
    with pytest.raises(RuntimeError, match="tiles: expected at least 130 rows, got 129"):
        torch.ops.mlora_ext.cuda_plan(table, 10, *tables)
