"""Memory of this process: free, in use, and its peak."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from functools import cache
from pathlib import Path

import torch


def free_memory(device: torch.device) -> int | None:
    """Returns the free bytes, or None if the system does not tell.

    On a CPU: those without swapping, and no more than the limits of the process's control groups leave.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return min([*found, *_left_by_groups()], default=None)


def _left_by_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Returns the bytes that each limit on this process's memory leaves (control groups, version 2).

    What caches files may be given up, so it counts as free.
    """
    lines = own.read_text().splitlines() if own.exists() else []
    place = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if place is None:
        return []
    found = []
    for folder in (root / place, *(root / place).parents):
        if not folder.is_relative_to(root):
            break
        try:
            limit = (folder / "memory.max").read_text().strip()
            used = int((folder / "memory.current").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # the topmost group has none
            continue
        if limit != "max":
            cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
            found.append(max(0, int(limit) - used + cached))
    return found


def peak_memory(device: torch.device) -> int:
    """Returns the most bytes in use so far: a CUDA device's own allocations, or the CPU's resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def used_memory(device: torch.device) -> int:
    """Returns the bytes in use now; on a CPU, the process's resident memory.

    On a CUDA device it is what PyTorch's allocator cannot give back: blocks in use, and the free parts of
    their segments.
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)  # empty before the first request
        kinds = ("active_bytes", "inactive_split_bytes")
        return sum(int(stats.get(f"{kind}.all.current", 0)) for kind in kinds)
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except FileNotFoundError:  # not Linux
        return peak_memory(device)


@cache
def used_at_first(device: torch.device) -> int:
    """Returns the bytes in use when this was first called, before the first of the process's runs."""
    return used_memory(device)


def left_by_runs(device: torch.device) -> int:
    """Returns the bytes that this process has taken, and not given back, since its first run began."""
    first = used_at_first(device)
    release_memory(device)
    return max(0, used_memory(device) - first)


def release_memory(device: torch.device) -> None:
    """Gives unused memory back to the system or the device's driver.

    On a CPU this is what glibc's malloc holds in free pages; other C libraries decide for themselves.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


class PeakMemory:
    """The most memory in use, kept across resets of the device's own peak."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before = 0

    def read(self) -> int:
        """Returns the peak in bytes."""
        self._before = max(self._before, peak_memory(self.device))
        return self._before

    def restart(self) -> None:
        """Restarts the device's own peak; a CPU's goes on."""
        self.read()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
