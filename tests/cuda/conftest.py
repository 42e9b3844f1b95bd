"""The operator's cases stand in tests/ext; a fixture has layers store their dropout masks."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlora_ext as mx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ext"))


@pytest.fixture
def saved_masks() -> Iterator[None]:
    mx.save_dropout_masks()
    yield
    mx.save_dropout_masks(False)
