"""Memory that one step of training frees and the next one needs again stays with the process."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt's parameters, <malloc.h>
_KEPT_BYTES, _LARGEST_BLOCK = 1 << 30, 32 << 20
_LARGE_BLOCK = 128 << 10


def keep_freed_memory() -> bool:
    """Let glibc's malloc keep up to 1 GiB of freed memory, made of blocks of up to 32 MiB.

    By itself it gives what lies at the end of its heap back to the system. Every step of training frees its
    activations there, and would have the system clear and map the same pages again (docs/design.md). Changes
    the whole process.

    Returns:
        Whether malloc was told to; not with another C library.
    """
    return _told({_TRIM_THRESHOLD: _KEPT_BYTES, _MMAP_THRESHOLD: _LARGEST_BLOCK})


def give_back_freed_memory() -> bool:
    """Let glibc's malloc map each block of 128 KiB or more by itself, and give it back as soon as it is free.

    The process has then resident what is allocated and little more, as a limit on it needs: in glibc's heap,
    blocks of changing sizes leave holes, which take up to three times as much (docs/design.md). Changes the
    whole process.

    Returns:
        As `keep_freed_memory`.
    """
    return _told({_MMAP_THRESHOLD: _LARGE_BLOCK, _TRIM_THRESHOLD: _LARGE_BLOCK})


def _told(parameters: Mapping[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all([mallopt(parameter, value) for parameter, value in parameters.items()])
