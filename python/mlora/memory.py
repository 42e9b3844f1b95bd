"""How much memory a process has used."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory(device: torch.device) -> int:
    """Return the most memory that was in use so far, in bytes.

    Args:
        device: a CUDA device counts its own allocations; the CPU the process's resident memory.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
