"""The partition against brute force, and what it refuses."""

import itertools
import random
from math import fsum, inf

import pytest
from mlora.planning.partition import Blocks, Cost, Table, fastest, partition


def table(blocks: list[float], embedding: float = 0.0, head: float = 0.0, weight: int = 1) -> Table:
    return Table(Cost(embedding, weight), tuple(Cost(s, weight) for s in blocks), Cost(head, weight))


def by_trying(tables: list[Table], limits: list[int | None], held: list[int]) -> tuple[float, float] | None:
    """The least largest time, and the least sum of squares with it, of all partitions that fit."""
    stages, count, found = len(tables), len(tables[0].blocks), []
    for cuts in itertools.combinations(range(1, count), stages - 1):
        ends = [0, *cuts, count]
        times = []
        for stage, (first, last) in enumerate(itertools.pairwise(ends)):
            parts = tables[stage].parts(first, last, stage == 0, stage == stages - 1)
            need = sum(part.weight_bytes + held[stage] * part.activation_bytes for part in parts)
            limit = limits[stage]
            times.append(inf if limit is not None and need > limit else fsum(p.seconds for p in parts))
        if max(times) < inf:
            found.append((max(times), fsum(time * time for time in times)))
    return min(found, default=None)


def random_table(draw: random.Random, count: int) -> Table:
    def cost() -> Cost:
        return Cost(draw.choice([draw.random(), 0.5]), draw.randrange(1, 9), draw.randrange(4))

    return Table(cost(), tuple(cost() for _ in range(count)), cost())


@pytest.mark.parametrize("seed", range(200))
def test_no_partition_is_better(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randrange(1, 8)
    stages = draw.randrange(1, count + 1)
    tables = [random_table(draw, count) for _ in range(stages)]
    limits = [draw.choice([None, draw.randrange(10, 80)]) for _ in range(stages)]
    held = [draw.randrange(1, 4) for _ in range(stages)]
    best = by_trying(tables, limits, held)
    if best is None:
        with pytest.raises(ValueError, match=f"^memory: no partition of {count} blocks over {stages} stages"):
            partition(tables, limits, held)
        return
    blocks = partition(tables, limits, held)
    own = [
        table.parts(first, last, stage == 0, stage == stages - 1)
        for stage, (table, (first, last)) in enumerate(zip(tables, blocks, strict=True))
    ]
    seconds = [fsum(part.seconds for part in parts) for parts in own]
    assert max(seconds) == best[0]
    assert fsum(time * time for time in seconds) == pytest.approx(best[1])
    for parts, count_held, limit in zip(own, held, limits, strict=True):
        need = sum(part.weight_bytes + count_held * part.activation_bytes for part in parts)
        assert limit is None or need <= limit
    assert blocks == partition(tables, limits, held)
    ends = [end for _, end in blocks]
    assert [0, *ends[:-1]] == [first for first, _ in blocks]
    assert ends[-1] == count


def cut(tables: list[Table]) -> Blocks:
    """The partition without limits."""
    return partition(tables, [None] * len(tables), [1] * len(tables))


def test_embedding_and_head_count() -> None:
    heavy = table([1.0] * 8, embedding=1.0, head=3.0)
    assert cut([heavy, heavy]) == ((0, 5), (5, 8))
    assert cut([heavy] * 3) == ((0, 3), (3, 7), (7, 8))


def test_slow_stages_get_less() -> None:
    fast, slow = table([1.0] * 6), table([2.0] * 6)
    assert cut([fast, slow]) == ((0, 4), (4, 6))
    assert cut([slow, fast]) == ((0, 2), (2, 6))


def test_equal_partitions_are_told_apart_by_their_squares_and_then_by_their_cuts() -> None:
    """The last stage sets the time; the first two are evened out, or the earlier one gets less."""
    assert cut([table([1.0] * 7, head=9.0)] * 3) == ((0, 3), (3, 6), (6, 7))
    assert cut([table([1.0] * 6, head=9.0)] * 3) == ((0, 2), (2, 5), (5, 6))


def test_memory_before_time() -> None:
    """Micro-batches in flight weigh more at the first stage, as in 1F1B."""
    costs = Table(Cost(0.0, 2), tuple(Cost(1.0, 3, 2) for _ in range(4)), Cost(0.0, 2))
    assert cut([costs, costs]) == ((0, 2), (2, 4))
    assert partition([costs, costs], [20, None], [5, 1]) == ((0, 1), (1, 4))


def test_refusals() -> None:
    one = table([1.0] * 3, weight=2**30)
    for call, message in [
        (lambda: cut([one] * 4), "^stages: expected 1 to 3, the number of blocks, got 4"),
        (
            lambda: partition([one] * 2, [2 * 2**30, 5 * 2**29], [1, 1]),
            "stage 1 with blocks 1 to 2 needs 3.000 GiB and may take 2.500 GiB$",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_devices_of_one_kind_are_as_fast_as_the_fastest_in_each_part() -> None:
    found = fastest([table([1.0, 3.0], 9.0, 0.5), table([2.0, 1.5], 0.1, 4.0), table([5.0, 5.0], 5.0, 5.0)])
    assert found == table([1.0, 1.5], 0.1, 0.5)
