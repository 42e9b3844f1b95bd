"""Where results lie, and how they are written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"


def write_json(path: Path, data: Mapping[str, Any], indent: int = 1) -> None:
    """Writes a result, in a folder that need not be there; an interruption leaves the file before it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(data, indent=indent) + "\n")
    scratch.replace(path)
