"""Fixtures of the training system's tests."""

from pathlib import Path

import pytest
from command_line import Run, invoke
from tiny_run import run_data, save_base, write_run


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of two layers and a byte-level tokenizer."""
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def run() -> Run:
    """The command line."""
    return invoke


@pytest.fixture(scope="session")
def trained(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, whose adapters the tests only read."""
    folder = tmp_path_factory.mktemp("trained")
    assert invoke("train", write_run(folder, run_data(tiny_base, folder))).exit_code == 0
    return folder / "run"
