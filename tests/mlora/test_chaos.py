"""A few of the random runs of `make soak` over stages."""

import pytest

from tests.mlora.chaos import attempt


@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (3, 4))]
)
def test_random_work_over_stages(seed: int) -> None:
    _, problem = attempt(seed)
    assert not problem
