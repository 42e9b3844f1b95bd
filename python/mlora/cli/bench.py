"""Runs the benchmarks, which are in the source checkout and not in the package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from mlora.errors import RunError

FOLDER = Path(__file__).resolve().parents[3] / "bench"


def run_suite(arguments: Sequence[str]) -> int:
    """Runs ``bench/suite.py`` in this process and returns its exit code; ``--help`` raises SystemExit."""
    if not (FOLDER / "suite.py").is_file():
        raise RunError(
            "bench: the installed package holds no benchmarks; in a source checkout, run "
            "`pip install --no-build-isolation -e .`"
        )
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return int(importlib.import_module("suite").main(arguments, program="mlora bench"))
