"""What runs before each change on slow backends covers every pair of parameters."""

from itertools import combinations, product

import pytest
from pairwise import cover, pairs_of


def settings(backend: int, *values: int) -> frozenset[tuple[str, str]]:
    return frozenset((f"p{place}", str(value)) for place, value in enumerate([backend, *values]))


@pytest.mark.parametrize("sizes", [(3,), (3, 2), (19, 3, 2), (5, 4, 3, 2)], ids=str)
@pytest.mark.parametrize("on_cpu", [True, False])
def test_every_pair_is_covered(sizes: tuple[int, ...], on_cpu: bool) -> None:
    values = list(product(*map(range, sizes)))
    fast = [settings(0, *each) for each in values] if on_cpu else []
    slow = [settings(backend, *each) for backend in (1, 2) for each in values]
    chosen = [slow[index] for index in cover(fast, slow)]
    covered = set().union(*map(pairs_of, [*fast, *chosen]))
    assert covered == set().union(*map(pairs_of, [*fast, *slow]))
    fewest = 2 * max(sizes) if on_cpu else max(a * b for a, b in combinations((2, *sizes), 2))
    assert len(chosen) <= 1.2 * fewest


def test_a_test_without_other_parameters_runs_on_each_backend() -> None:
    assert cover([settings(0)], [settings(1), settings(2)]) == [0, 1]
