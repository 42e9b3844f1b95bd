"""Loads the compiled library."""

from __future__ import annotations

from pathlib import Path

import torch

LIBRARY = Path(__file__).parent / "libmlora_ops.so"
LOADED = LIBRARY.exists()
if LOADED:
    torch.ops.load_library(str(LIBRARY))


def check_library() -> None:
    """Raises RuntimeError if the compiled operators are missing, and says how to build them."""
    if not LOADED:
        raise RuntimeError(
            f"the compiled operators are missing ({LIBRARY.name} is not in {LIBRARY.parent}). Build them "
            "with `pip install --no-build-isolation .` or `make env` in the source folder, or use the slow "
            "plain PyTorch implementation: mlora_ext.use_backend('reference')"
        )
