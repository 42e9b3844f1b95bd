"""Meters: what a process has in use, and what a piece of work adds to it.

A process's memory is resident memory on a CPU, and what PyTorch's allocator holds on a GPU. Work is measured
exactly on a CPU, by the allocator's count on a GPU. It comes in pieces, forward now and backward later. Other
work's memory in between does not count.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import weakref
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


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


class LiveMemory(TorchDispatchMode):
    """Counts the storages that PyTorch's operators make in this thread inside `with`, while they live.

    A storage counts from the call that made it until it is freed, wherever that happens. Scratch memory that
    an operator takes and frees within one call is not seen. Storages on other devices than `device` do not
    count. Works with fake tensors too.

    Attributes:
        live: bytes that the work holds now.
        peaks: the most bytes that it held at once, for each phase since `restart`.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self._device = torch.device(device).type
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._changes: list[int] = []
        self._marks: list[int] = []

    @property
    def live(self) -> int:
        return sum(self._changes)

    @property
    def peaks(self) -> list[int]:
        levels = [0, *accumulate(self._changes)]
        ends = [0, *self._marks, len(levels) - 1]
        return [max(levels[begin : end + 1]) for begin, end in pairwise(ends)]

    def mark(self) -> None:
        """Begins a new phase."""
        self._marks.append(len(self._changes))

    def restart(self, given: Iterable[Tensor] = ()) -> None:
        """Counts from zero; tensors of `given` count as if the work had made them."""
        self._seen, self._changes, self._marks = {}, [], []
        self.adopt(given)

    def adopt(self, given: Iterable[Tensor]) -> None:
        """Counts tensors that the work received, unless it made them."""
        for tensor in given:
            self._count(tensor)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Counts what an operator makes; a view of an argument was there before."""
        results = function(*args, **(kwargs or {}))
        made = [t for t in _tensors(results) if t.untyped_storage()._cdata not in self._seen]
        # the result of `torch.tensor` appears for the first time as an argument of `lift_fresh`
        if made and function is not torch.ops.aten.lift_fresh.default:
            there = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
            made = [t for t in made if t.untyped_storage()._cdata not in there]
        for tensor in made:
            self._count(tensor)
        return results

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen or tensor.device.type != self._device:
            return
        size = storage.nbytes()
        seen, changes = self._seen, self._changes

        def freed(_: object) -> None:
            # Any thread may call this: a list's append is atomic, and `restart` makes new lists.
            del seen[key]
            changes.append(-size)

        seen[key] = weakref.ref(storage, freed)
        changes.append(size)


def _tensors(tree: Any) -> list[Tensor]:
    """Returns the tensors that have a storage; oneDNN's packed weights have none."""
    if isinstance(tree, Tensor):
        return [tree] if tree.layout is torch.strided else []
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    found: list[Tensor] = []
    for leaf in tree:
        if isinstance(leaf, Tensor):
            if leaf.layout is torch.strided:
                found.append(leaf)
        elif isinstance(leaf, list | tuple | dict):
            found += _tensors(leaf)
    return found


class AllocatedMemory:
    """Counts the bytes that anyone requests of PyTorch's GPU allocator inside `with`; see `LiveMemory`.

    Requested bytes depend only on the work's shapes. The blocks that are handed out do not: a block is up to
    1 MiB larger, as the allocator's free blocks happen to be. `PeakMemory` keeps the GPU's peak over its
    resets.
    """

    def __init__(self, peaks: PeakMemory) -> None:
        self._gpu = peaks
        self._left = self._begin = 0
        self._most = [0]
        self._inside = False

    @property
    def live(self) -> int:
        return self._left + (self._asked("current") - self._begin) * self._inside

    @property
    def peaks(self) -> list[int]:
        now = self._asked("peak") - self._begin if self._inside else 0
        return [*self._most[:-1], max(self._most[-1], self._left + now)]

    def mark(self) -> None:
        self._pause()
        self._most.append(self._left)
        self._go_on()

    def restart(self, given: Iterable[Tensor] = ()) -> None:
        self._left, self._most = 0, [0]
        self._go_on()
        self.adopt(given)

    def adopt(self, given: Iterable[Tensor]) -> None:
        """Counts tensors that the work received, each as often as it is given."""
        self._left += sum(tensor.nbytes for tensor in given if tensor.device.type == "cuda")
        self._most[-1] = max(self._most[-1], self.live)

    def __enter__(self) -> Self:
        self._inside = True
        self._go_on()
        return self

    def __exit__(self, *error: object) -> None:
        self._pause()
        self._inside = False

    def _pause(self) -> None:
        self._most, self._left = self.peaks, self.live

    def _go_on(self) -> None:
        self._begin = self._asked("current")
        self._gpu.restart()

    def _asked(self, which: str) -> int:
        stats = torch.cuda.memory_stats(self._gpu.device)  # empty before the first request
        return int(stats.get(f"requested_bytes.all.{which}", 0))


WorkMemory = LiveMemory | AllocatedMemory


def work_memory(peaks: PeakMemory) -> WorkMemory:
    """Returns the meter for a device: `LiveMemory` on a CPU, `AllocatedMemory` on a GPU."""
    return AllocatedMemory(peaks) if peaks.device.type == "cuda" else LiveMemory(peaks.device)
