"""Fixtures for all tests: fresh random inputs that a failure can repeat, and torch left as it was found."""

import os
import random
import signal
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when kernels are defined: they run in its interpreter, on CPU tensors.
    os.environ["TRITON_INTERPRET"] = "1"

# A shell starts background jobs with SIGINT ignored; here it works as in the foreground.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def fresh_seed(request: pytest.FixtureRequest) -> Iterator[int]:
    """Seed torch differently in every run and print the seed with a failure."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"torch.manual_seed({seed}) in {request.node.name}")
    torch.manual_seed(seed)
    yield seed
    torch.use_deterministic_algorithms(False)
