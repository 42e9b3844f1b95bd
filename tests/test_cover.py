"""The choice of the tests that run before each change: a cover of lines, and pairs of parameters."""

from itertools import combinations, product

import pytest
from pairwise import cover, pairs_of

from tests.cover import LEFT, left_out


def test_slow_tests_that_add_no_line_are_left_out() -> None:
    lines = {"quick": {1, 2}, "dear": {1, 3, 4}, "cheap": {3, 4}, "more": {4, 5}, "none": {2, 4}}
    seconds = {"quick": 0.1, "dear": 9.0, "cheap": 1.0, "more": 2.0, "none": 1.0, "unseen": 3.0}
    assert left_out(lines, seconds) == ["dear", "none", "unseen"]


def test_each_function_that_tests_kernels_has_a_part() -> None:
    slow = {f"tests/cuda/test_x.py::test_{name}[{value}]": value + 1.0 for name in "ab" for value in range(3)}
    assert left_out({}, slow) == [test for test in sorted(slow) if "[0]" not in test]


def test_what_is_left_out_exists() -> None:
    """Each line's file and function; of parameters, `make cover` knows."""
    left = LEFT.read_text(encoding="utf-8").splitlines()
    assert left
    texts = {file: (LEFT.parent.parent / file).read_text() for file in {line.split("::")[0] for line in left}}
    names = {line: line.split("[")[0].split("::") for line in left}
    assert not [line for line, (file, *_, name) in names.items() if f"def {name}(" not in texts[file]]


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
