"""Memory that one step of training frees and the next one needs again stays with the process."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt's parameters, <malloc.h>
_KEPT_BYTES, _LARGEST_BLOCK = 1 << 30, 32 << 20


def keep_freed_memory() -> bool:
    """Let glibc's malloc keep up to 1 GiB of freed memory, made of blocks of up to 32 MiB.

    By itself it gives what lies at the end of its heap back to the system. Every step of training frees its
    activations there, and would have the system clear and map the same pages again (docs/design.md). Changes
    the whole process.

    Returns:
        Whether malloc was told to; not with another C library.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK))
