"""Sets how glibc's malloc and oneDNN hold memory; each call changes the whole process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt's parameters, <malloc.h>
_KEPT_BYTES, _LARGEST_BLOCK = 1 << 30, 32 << 20
_LARGE_BLOCK = 128 << 10
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def keep_freed_memory() -> bool:
    """Lets glibc's malloc keep up to 1 GiB of freed memory, in blocks of up to 32 MiB.

    By default malloc gives memory at the end of its heap back to the system. Every training step frees its
    activations there, and the system would clear and map the same pages again (decision 32). Returns False
    with another C library, where nothing changes.
    """
    return _told({_TRIM_THRESHOLD: _KEPT_BYTES, _MMAP_THRESHOLD: _LARGEST_BLOCK})


def give_back_freed_memory() -> bool:
    """Lets glibc's malloc map each block of 128 KiB or more by itself, and give it back once it is free.

    Then little more is resident than is allocated, as a memory limit needs. In glibc's heap, blocks of
    changing sizes leave holes, which take up to three times as much (decision 32). Returns as
    `keep_freed_memory`.
    """
    return _told({_MMAP_THRESHOLD: _LARGE_BLOCK, _TRIM_THRESHOLD: _LARGE_BLOCK})


def _told(parameters: Mapping[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all([mallopt(parameter, value) for parameter, value in parameters.items()])


def bound_caches() -> None:
    """Limits oneDNN's cache, and torch's own cache before it, to 64 shapes each; the default is 1024.

    Packed micro-batches hardly ever repeat a number of rows, and each number makes some twenty entries of 0.2
    to 0.6 MiB. Resident memory grew by 4 to 20 MiB a step, for hundreds of MiB, and no step got faster
    (decision 32). The only switch of both libraries is an environment variable, which they read at their
    first use. Values that the user has set stay.
    """
    for name in _CACHES:
        os.environ.setdefault(name, "64")
