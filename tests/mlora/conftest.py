"""Fixtures of the training system's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_run import save_base


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """One thread: models this small gain nothing from a second one, and lose on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of two layers and a byte-level tokenizer."""
    return save_base(tmp_path_factory.mktemp("base"))
