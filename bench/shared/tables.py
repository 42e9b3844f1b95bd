"""Cells of text tables."""

from __future__ import annotations

import torch


def width(spec: str) -> int:
    """Returns how wide a format such as `9.3f` or `9d` is."""
    return int(spec.partition(".")[0].rstrip("d"))


def cell(value: float | None, spec: str, factor: float = 1) -> str:
    """Returns a number times a factor, or as many blanks where there is none."""
    return " " * width(spec) if value is None else f"{factor * value:{spec}}"


def dtype_name(dtype: torch.dtype) -> str:
    """Returns `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
