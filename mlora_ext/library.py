"""Loads the compiled library."""

from __future__ import annotations

from pathlib import Path

import torch

LIBRARY = Path(__file__).parent / "libmlora_ops.so"
LOADED = LIBRARY.exists()
if LOADED:
    torch.ops.load_library(str(LIBRARY))


def check_library() -> None:
    """Raises RuntimeError if the compiled operators are missing, and says what to do."""
    if not LOADED:
        raise RuntimeError(
            f"the compiled operators are missing ({LIBRARY.name} is not in {LIBRARY.parent}). In a source "
            "folder, build them there with `make env` or `pip install --no-build-isolation -e .`, or start "
            "Python in another folder to use an installed package, which this folder hides. "
            "mlora_ext.use_backend('reference') needs no compiled operators, but is slow"
        )
