"""A sweep's config, and runs that draw nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sweep_data import sweep_data
from sweep_runs import RATES


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of each run; `tests/mlora/cli/test_cli_sweep.py` draws them."""
    monkeypatch.setattr("mlora.run.loop.plot_losses", lambda *_: None)
    monkeypatch.setattr("mlora.sweep.outcome.plot_trials", lambda *_: None)


@pytest.fixture
def data(tiny_base: Path, tmp_path: Path) -> dict[str, Any]:
    return sweep_data(tiny_base, tmp_path, search=RATES)
