"""Tells errors of memory from others."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch's allocator on the CPU has no exception type for it."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
