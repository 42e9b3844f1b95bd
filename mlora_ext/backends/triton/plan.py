"""The plan of a batch, made on the host: docs/dev/gpu.md gives its tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..plan import SPLIT_TILES, TILE_ROWS, Row


def plan_rows(segments: Sequence[Row], rows: int, adapters: int) -> tuple[list[Row], list[Row], list[Row]]:
    """Returns the rows of `tiles`, `splits` and `groups`.

    Args:
        segments: rows `(begin, end, adapter, row0)`, ascending.
        rows: T.
        adapters: N; a segment of another one counts as one of -1.
    """
    served = [one for one in segments if 0 <= one[2] < adapters and one[0] < one[1]]
    tiles: list[Row] = []
    splits: list[Row] = []
    groups: list[Row] = []
    slots = 0
    for adapter in range(adapters):
        first = len(tiles)
        for begin, end, who, row0 in served:
            if who == adapter:
                tiles += _tiles(begin, end, adapter, row0)
        cuts = range(first, max(len(tiles), first + 1), SPLIT_TILES)
        several = len(cuts) > 1
        for number, cut in enumerate(cuts):
            slot = slots + number if several else -1
            splits.append((cut, min(cut + SPLIT_TILES, len(tiles)), adapter, slot))
        groups.append((first, len(tiles), slots, len(cuts) if several else 0))
        slots += len(cuts) if several else 0
    first, reached = len(tiles), 0
    for begin, end, _, _ in [*served, (rows, rows, -1, 0)]:
        tiles += _tiles(reached, begin, -1, 0)
        reached = end
    splits += [
        (cut, min(cut + SPLIT_TILES, len(tiles)), -1, -1) for cut in range(first, len(tiles), SPLIT_TILES)
    ]
    return tiles, splits, groups


def _tiles(begin: int, end: int, adapter: int, row0: int) -> Iterator[Row]:
    for row in range(begin, end, TILE_ROWS):
        philox_row = 0 if adapter < 0 else (row0 + row - begin + 2**31) % 2**32 - 2**31
        yield row, min(TILE_ROWS, end - row), adapter, philox_row
