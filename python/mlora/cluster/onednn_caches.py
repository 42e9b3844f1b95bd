"""Limits oneDNN's caches of the shapes that it has multiplied."""

from __future__ import annotations

import os

_ENTRIES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}


def bound_caches() -> None:
    """Limits oneDNN's cache, and torch's own cache before it, to 64 shapes each; the default is 1024.

    Packed micro-batches hardly ever repeat a number of rows, and each number makes some twenty entries of 0.2
    to 0.6 MiB. Resident memory grew by 4 to 20 MiB a step, for hundreds of MiB, and no step got faster
    (docs/design.md). The only switch of both libraries is an environment variable, which they read at their
    first use. Values that the user has set stay.
    """
    for name, entries in _ENTRIES.items():
        os.environ.setdefault(name, entries)
