"""Warnings that point at the code that called this library."""

from __future__ import annotations

import sys
import warnings


def warn_caller(message: str) -> None:
    """Warns (UserWarning) with the line outside of this library that led here."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("mlora_ext."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
