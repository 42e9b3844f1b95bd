"""The processes that tests start compute as this one does: as many threads, the same kernels."""

import os
import subprocess
import sys

import pytest
import torch

from tests.mlora.stage_runs import ENVIRONMENT
from tests.mlora.stages import stages

SAYS = "import torch, mlora_ext; print(torch.get_num_threads(), torch.ops.mlora_ext.cpu_isa())"


@pytest.fixture
def here() -> str:
    return f"{torch.get_num_threads()} {torch.ops.mlora_ext.cpu_isa()}\n"


@pytest.mark.parametrize("sources", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_programs(here: str, sources: bool) -> None:
    environment = ENVIRONMENT if sources else dict(os.environ)
    done = subprocess.run([sys.executable, "-c", SAYS], env=environment, capture_output=True, text=True)
    assert done.stdout == here, done.stderr


def test_stages(here: str) -> None:
    with stages(SAYS, SAYS) as running:
        codes, outputs, errors = running.end()
    assert (codes, outputs) == ([0, 0], [here, here]), errors
