"""Where results lie, how they are written, and cells of text tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parents[1] / "results"


def write_json(path: Path, data: Mapping[str, Any], indent: int = 1) -> None:
    """Writes a result, in a folder that need not be there; an interruption leaves the file before it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(data, indent=indent) + "\n")
    scratch.replace(path)


def width(spec: str) -> int:
    """Returns how wide a format such as `9.3f` or `9d` is."""
    return int(spec.partition(".")[0].rstrip("d"))


def cell(value: float | None, spec: str, factor: float = 1) -> str:
    """Returns a number times a factor, or as many blanks where there is none."""
    return " " * width(spec) if value is None else f"{factor * value:{spec}}"


def dtype_name(dtype: torch.dtype) -> str:
    """Returns `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
