"""The benchmarks, which lie beside the package in a source checkout and are no part of it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from mlora.errors import RunError

FOLDER = Path(__file__).resolve().parents[3] / "bench"


def run_suite(arguments: Sequence[str]) -> int:
    """Run ``bench/suite.py`` in this process.

    Args:
        arguments: its command line.

    Returns:
        Its exit code.

    Raises:
        RunError: this is an installed package without the source checkout.
        SystemExit: from the suite's own parser, as for ``--help``.
    """
    if not (FOLDER / "suite.py").is_file():
        raise RunError(
            "bench: the benchmarks are part of the source checkout, not of the installed package; "
            "in a checkout: pip install --no-build-isolation -e ."
        )
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return int(importlib.import_module("suite").main(arguments, program="mlora bench"))
