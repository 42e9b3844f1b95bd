"""Memory that direct reads and writes use.

It lies in huge pages where the kernel has some, because the kernel cuts a transfer into a segment per page.
Reads of a virtual disk went from 1.0 to 2.2 GB/s by it (`python -m bench offload io`).
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress

import torch
from mlora_ext._C import ALIGN
from torch import Tensor

SLAB = 32 << 20
"""Bytes of a slab, unless one area needs more."""


def aligned(size: int) -> int:
    """Returns a size rounded up to a multiple of `ALIGN`."""
    return -(-size // ALIGN) * ALIGN


def buffer(size: int) -> Tensor:
    """Returns `size` bytes, rounded up to `ALIGN`, and touched, so that memory meters count them."""
    return torch.frombuffer(_pages(aligned(size)), dtype=torch.uint8).zero_()


def _pages(size: int) -> mmap.mmap:
    pages = mmap.mmap(-1, max(ALIGN, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class _Slab:
    """Memory that is filled from its begin; it is empty again once no tensor lies in it."""

    def __init__(self, size: int) -> None:
        self._bytes = memoryview(_pages(size))
        self._used = self._areas = 0
        self.nbytes = len(self._bytes)

    @property
    def is_empty(self) -> bool:
        return self._areas == 0

    def has_room(self, size: int) -> bool:
        return self._used + size <= self.nbytes

    def take(self, size: int) -> Tensor:
        self._areas += 1  # first: from here on nothing that is dropped meanwhile empties the slab
        area = self._bytes[self._used : self._used + size]
        self._used += size
        weakref.finalize(area, self._drop).atexit = False
        return torch.frombuffer(area, dtype=torch.uint8)

    def _drop(self) -> None:
        self._areas -= 1
        if self._areas == 0:
            self._used = 0


class Slabs:
    """Memory for tensors that come and go: its pages are used again, since new ones cost processor time."""

    def __init__(self) -> None:
        self._slabs: list[_Slab] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in self._slabs)

    def take(self, size: int) -> Tensor:
        """Returns `size` bytes, rounded up to `ALIGN`; they are free again when no tensor uses them."""
        size = max(ALIGN, aligned(size))
        slab = next((each for each in self._slabs if each.has_room(size)), None)
        if slab is None:
            slab = _Slab(max(SLAB, size))
            self._slabs = [each for each in self._slabs if not each.is_empty] + [slab]  # those are too small
        return slab.take(size)
