"""The tile plan, in plain Python: docs/dev/gpu.md read aloud."""

from dataclasses import dataclass

TILE, SPLIT = 64, 16
Row = tuple[int, int, int, int]


@dataclass
class PlanOracle:
    """Rows of the plan's tables, without unused entries."""

    tiles: list[Row]
    splits: list[Row]
    groups: list[Row]


def plan_of(segments: list[Row], total_rows: int, adapters: int) -> PlanOracle:
    """The plan of segments `(begin, end, adapter, row0)` in the order of their rows."""
    tiles: list[Row] = []
    owned = [s for s in segments if s[2] >= 0 and s[1] > s[0]]
    groups_of_tiles = []
    for adapter in range(adapters):
        begin = len(tiles)
        for first, end, who, row0 in owned:
            if who == adapter:
                tiles += [
                    (row, min(TILE, end - row), adapter, _signed(row0 + row - first))
                    for row in range(first, end, TILE)
                ]
        groups_of_tiles.append((begin, len(tiles)))
    base = len(tiles)
    reached = 0
    for first, end, _, _ in [*owned, (total_rows, total_rows, -1, 0)]:
        tiles += [(row, min(TILE, first - row), -1, 0) for row in range(reached, first, TILE)]
        reached = end
    splits: list[Row] = []
    groups: list[Row] = []
    slots = 0
    for adapter, (begin, end) in enumerate(groups_of_tiles):
        cuts = list(range(begin, end, SPLIT)) or [begin]
        several = len(cuts) > 1
        splits += [
            (cut, min(cut + SPLIT, end), adapter, slots + k if several else -1) for k, cut in enumerate(cuts)
        ]
        groups.append((begin, end, slots, len(cuts) if several else 0))
        slots += len(cuts) if several else 0
    splits += [(cut, min(cut + SPLIT, len(tiles)), -1, -1) for cut in range(base, len(tiles), SPLIT)]
    return PlanOracle(tiles, splits, groups)


def _signed(row: int) -> int:
    row %= 2**32
    return row - 2**32 if row >= 2**31 else row
