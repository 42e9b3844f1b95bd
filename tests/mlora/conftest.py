"""Fixtures of the training system's tests."""

from pathlib import Path

import pytest
from tiny_run import save_base


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of two layers and a byte-level tokenizer."""
    return save_base(tmp_path_factory.mktemp("base"))
