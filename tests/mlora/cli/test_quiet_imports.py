"""Libraries for quantised weights are imported where they are installed; what they say is shown if needed."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import run_data, write_run

NOTICES = ("gemm_4bit_forward", "_pytree.py", "torchao")


@pytest.mark.peers
@pytest.mark.parametrize(
    ("words", "quantization"),
    [("validate", None), ("validate", {"method": "bnb-nf4"}), ("data show", None)],
)
def test_notices_of_libraries_are_shown_if_the_base_is_quantised(
    tiny_base: Path, tmp_path: Path, words: str, quantization: dict[str, str] | None
) -> None:
    data = run_data(tiny_base, tmp_path, quantization=quantization)
    path = write_run(tmp_path, data)
    command = [sys.executable, "-m", "mlora", *words.split(), str(path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    shown = [line for line in result.stderr.splitlines() if any(notice in line for notice in NOTICES)]
    assert bool(shown) == (quantization is not None)
    if quantization is None:
        assert result.stderr == ""
