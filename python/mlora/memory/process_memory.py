"""How much memory a process has used."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from functools import cache
from pathlib import Path

import torch


def free_memory(device: torch.device) -> int | None:
    """Return how much memory is free, in bytes, or none where the system does not tell.

    Args:
        device: a CUDA device, or the CPU: what the machine can give without swapping.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def peak_memory(device: torch.device) -> int:
    """Return the most memory that was in use so far, in bytes.

    Args:
        device: a CUDA device counts its own allocations; the CPU the process's resident memory.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def used_memory(device: torch.device) -> int:
    """Return the memory that is in use now, in bytes.

    Args:
        device: of a CUDA device, what PyTorch's allocator cannot give back: blocks in use, and what is free
            beside them in their segments; of the CPU, what the process has resident.
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)  # empty where nothing has been asked for
        kinds = ("active_bytes", "inactive_split_bytes")
        return sum(int(stats.get(f"{kind}.all.current", 0)) for kind in kinds)
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except FileNotFoundError:  # not Linux
        return peak_memory(device)


@cache
def used_at_first(device: torch.device) -> int:
    """Return the memory that was in use when this was first asked, before the first of the process's runs.

    Args:
        device: as for `used_memory`.
    """
    return used_memory(device)


def left_by_runs(device: torch.device) -> int:
    """Return the memory that earlier runs of this process have left in use, in bytes, and what else the
    process has taken since the first of them began.

    Args:
        device: as for `used_memory`.
    """
    first = used_at_first(device)
    release_memory(device)
    return max(0, used_memory(device) - first)


def release_memory(device: torch.device) -> None:
    """Give memory that nothing uses back to the system, or to the device's driver.

    Args:
        device: a CUDA device, or the CPU: what glibc's malloc holds in free pages; another C library decides
            for itself.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


class PeakMemory:
    """The most memory that was in use, also where the device's own peak is reset between.

    Args:
        device: as for `peak_memory`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before = 0

    def read(self) -> int:
        """Return it, in bytes."""
        self._before = max(self._before, peak_memory(self.device))
        return self._before

    def restart(self) -> None:
        """Let the device count its peak from now on; a CPU's goes on."""
        self.read()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
