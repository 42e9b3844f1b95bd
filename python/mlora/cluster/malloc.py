"""Sets whether glibc's malloc keeps freed memory, such as that which the next training step needs again."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt's parameters, <malloc.h>
_KEPT_BYTES, _LARGEST_BLOCK = 1 << 30, 32 << 20
_LARGE_BLOCK = 128 << 10


def keep_freed_memory() -> bool:
    """Lets glibc's malloc keep up to 1 GiB of freed memory, in blocks of up to 32 MiB.

    By default malloc gives memory at the end of its heap back to the system. Every training step frees its
    activations there, and the system would clear and map the same pages again (docs/design.md). Changes the
    whole process. Returns False with another C library, where nothing changes.
    """
    return _told({_TRIM_THRESHOLD: _KEPT_BYTES, _MMAP_THRESHOLD: _LARGEST_BLOCK})


def give_back_freed_memory() -> bool:
    """Lets glibc's malloc map each block of 128 KiB or more by itself, and give it back once it is free.

    Then little more is resident than is allocated, as a memory limit needs. In glibc's heap, blocks of
    changing sizes leave holes, which take up to three times as much (docs/design.md). Changes the whole
    process. Returns as `keep_freed_memory`.
    """
    return _told({_MMAP_THRESHOLD: _LARGE_BLOCK, _TRIM_THRESHOLD: _LARGE_BLOCK})


def _told(parameters: Mapping[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all([mallopt(parameter, value) for parameter, value in parameters.items()])
