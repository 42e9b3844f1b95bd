"""Measures the memory that work adds: exactly on a CPU, by the allocator's count on a GPU.

Work comes in pieces, forward now and backward later. Other work's memory in between does not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mlora.memory.process_memory import PeakMemory


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
