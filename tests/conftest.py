"""Fixtures for all tests: fresh random inputs that a failure can repeat, and torch left as it was found."""

import random
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_seed(request: pytest.FixtureRequest) -> Iterator[int]:
    """Seed torch differently in every run and print the seed with a failure."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"torch.manual_seed({seed}) in {request.node.name}")
    torch.manual_seed(seed)
    yield seed
    torch.use_deterministic_algorithms(False)
