"""A sweep's config."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from sweep_data import sweep_data
from sweep_runs import RATES


@pytest.fixture
def data(tiny_base: Path, tmp_path: Path) -> dict[str, Any]:
    return sweep_data(tiny_base, tmp_path, search=copy.deepcopy(RATES))
