"""Decides which decoder blocks each stage gets: fastest slowest stage, within every stage's memory.

Pure data: costs are measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum, inf

from mlora.offload.base_bytes import slot_bytes


@dataclass(frozen=True)
class Cost:
    """What one part of a model costs a stage for one micro-batch.

    Attributes:
        seconds: of forward and backward.
        weight_bytes: of weights that stay in memory.
        activation_bytes: kept from forward to backward.
        streamed_bytes: of weights that are in a slot of memory while the part is used.
    """

    seconds: float
    weight_bytes: int
    activation_bytes: int = 0
    streamed_bytes: int = 0


@dataclass(frozen=True)
class Table:
    """What a model's parts cost on one stage's device.

    Attributes:
        embedding: everything before the blocks; on the first stage.
        head: final norm, head and loss; on the last stage.
    """

    embedding: Cost
    blocks: tuple[Cost, ...]
    head: Cost

    def parts(self, first: int, last: int, is_first: bool, is_last: bool) -> list[Cost]:
        """Returns the parts of a stage with the blocks `first` to `last - 1`."""
        return [*[self.embedding] * is_first, *self.blocks[first:last], *[self.head] * is_last]


def fastest(tables: Sequence[Table]) -> Table:
    """Merges equal devices' tables of one model: keeps each part's fastest measurement, which drops noise."""

    def least(costs: Sequence[Cost]) -> Cost:
        return min(costs, key=lambda cost: cost.seconds)

    blocks = zip(*(table.blocks for table in tables), strict=True)
    return Table(
        least([table.embedding for table in tables]),
        tuple(map(least, blocks)),
        least([table.head for table in tables]),
    )


Blocks = tuple[tuple[int, int], ...]
"""`(first, last)` of each stage: its blocks are `first` to `last - 1`."""


def partition(
    tables: Sequence[Table], limits: Sequence[int | None], in_flight: Sequence[int], slots: int = 0
) -> Blocks:
    """Cuts a model's blocks into contiguous, non-empty runs, one per stage.

    Minimises the largest `seconds` of a stage; among equal ones the sum of squares, which spreads the rest
    evenly; among those it takes the earliest cuts, from the last stage on. A stage's memory is `Σ
    weight_bytes + in_flight · Σ activation_bytes`, and of streamed blocks a slot of the largest for each, at
    most `slots`. Exact, by dynamic programming over the blocks.

    Args:
        tables: one per stage, as measured on its device; all of the same model.
        limits: bytes that each stage may take; None = any.
        in_flight: micro-batches whose activations each stage holds at once.
        slots: of each stage for blocks that are streamed.

    Raises:
        ValueError: if no partition stays within the limits (the message says what the closest one needs), or
            there are fewer blocks than stages.
    """
    stages, count = len(tables), len(tables[0].blocks)
    if stages > count:
        raise ValueError(f"stages: expected 1 to {count}, the number of blocks, got {stages}")

    def parts(stage: int, first: int, last: int) -> list[Cost]:
        return tables[stage].parts(first, last, stage == 0, stage == stages - 1)

    def seconds(stage: int, first: int, last: int) -> float:
        return fsum(part.seconds for part in parts(stage, first, last))

    def memory(stage: int, first: int, last: int) -> int:
        own = parts(stage, first, last)
        kept = sum(part.weight_bytes + in_flight[stage] * part.activation_bytes for part in own)
        return kept + slot_bytes([block.streamed_bytes for block in tables[stage].blocks[first:last]], slots)

    def excess(stage: int, first: int, last: int) -> float:
        limit = limits[stage]
        return -inf if limit is None else memory(stage, first, last) - limit

    def allowed(stage: int, first: int, last: int) -> float:
        return seconds(stage, first, last) if excess(stage, first, last) <= 0 else inf

    slowest, _ = _best(stages, count, allowed, max)
    if slowest == inf:
        _, tightest = _best(stages, count, excess, max)
        raise ValueError(_does_not_fit(tightest, memory, limits))

    def square(stage: int, first: int, last: int) -> float:
        time = allowed(stage, first, last)
        return time * time if time <= slowest else inf

    return _best(stages, count, square, lambda a, b: a + b)[1]


def _best(
    stages: int,
    count: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, Blocks]:
    """Returns the partition of least cost; `best[j]` is that of the first j blocks over the stages so far."""
    best: dict[int, tuple[float, Blocks]] = {
        last: (cost(0, 0, last), ((0, last),)) for last in range(1, count - stages + 2)
    }
    for stage in range(1, stages):
        following = {}
        for last in range(stage + 1, count - stages + stage + 2):
            options = [
                (join(best[first][0], cost(stage, first, last)), (*best[first][1], (first, last)))
                for first in range(stage, last)
            ]
            following[last] = min(options, key=lambda option: option[0])
        best = following
    return best[count]


def _does_not_fit(
    blocks: Blocks, memory: Callable[[int, int, int], int], limits: Sequence[int | None]
) -> str:
    """Says what the stage needs that is the furthest beyond its limit."""
    needs = [
        (memory(stage, *run), limit, stage, run)
        for stage, (run, limit) in enumerate(zip(blocks, limits, strict=True))
        if limit is not None
    ]
    need, limit, stage, (first, last) = max(needs, key=lambda each: each[0] - each[1])
    return (
        f"memory: no partition of {blocks[-1][1]} blocks over {len(blocks)} stages fits; in the one that is "
        f"the least beyond its limits, stage {stage} with blocks {first} to {last - 1} needs "
        f"{need / 2**30:.3f} GiB and may take {limit / 2**30:.3f} GiB"
    )
