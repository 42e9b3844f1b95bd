"""Bounds on what oneDNN remembers of the shapes that it has multiplied."""

from __future__ import annotations

import os

_ENTRIES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}


def bound_caches() -> None:
    """Let oneDNN, and torch's own cache before it, remember 64 shapes each, not 1024.

    Packed micro-batches hardly ever have as many rows as one before, and each number of rows makes some
    twenty entries of 0.2 to 0.6 MiB: resident memory grew by 4 to 20 MiB a step, for hundreds of MiB, and no
    step got faster (docs/design.md). Neither library has another switch than its environment variable, which
    it reads when it is first used; what the user has set stays.
    """
    for name, entries in _ENTRIES.items():
        os.environ.setdefault(name, entries)
