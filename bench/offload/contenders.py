"""Ways to train adapters over a base: in memory, read from a disk, or mapped."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from mlora.data.dataset import Sample
from mlora.engine.engine import Engine
from mlora.offload.block_layout import BlockLayout, StoredTensor
from mlora.offload.options import OffloadOptions
from mlora.offload.stream import BlockStream
from mlora.offload.streamed_weight import StreamedWeight
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from torch import Tensor

from mlora_ext import MultiLoRALinear
from offload.base import DTYPE

ALL_LINEAR = "all-linear"
_PAGE = mmap.PAGESIZE


def resident(base: Path) -> Engine:
    """An engine whose base is in memory."""
    return Engine(base, dtype=DTYPE)


def overlapped(base: Path, slots: int) -> Engine:
    """An engine that reads the next blocks while it computes with one."""
    return Engine(base, dtype=DTYPE, offload=OffloadOptions(base="disk", slots=slots))


def serial(base: Path, slots: int) -> Engine:
    """An engine that reads a block when it is used, and never before; it keeps as many as `overlapped`."""
    engine = overlapped(base, slots)
    stream_of(engine).prefetch = lambda block: None  # type: ignore[method-assign]
    return engine


def mapped(base: Path, *, ahead: bool) -> Engine:
    """An engine whose base is mapped into memory, and whose pages are dropped after use.

    Args:
        ahead: ask the system for the next block's pages when a block is first used.
    """
    engine = overlapped(base, 2)
    blocks = MappedBlocks(stream_of(engine).layouts, ahead=ahead)
    for layer in engine.model.modules():
        if isinstance(layer, MultiLoRALinear) and isinstance(layer.frozen, StreamedWeight):
            layer.frozen._stream = blocks  # type: ignore[assignment]
    engine._base.stream = None  # its slots are not needed
    return engine


def stream_of(engine: Engine) -> BlockStream:
    """Returns what reads an engine's blocks."""
    stream = engine._base.stream
    assert stream is not None
    return stream


class MappedBlocks:
    """Gives out blocks like a `BlockStream`, as views of mapped files.

    When another block is used, the pages of the one before leave the process and the page cache.
    """

    def __init__(self, layouts: Sequence[BlockLayout], *, ahead: bool) -> None:
        self._layouts, self._ahead, self._now = layouts, ahead, -1
        self._maps: dict[str, tuple[mmap.mmap, int]] = {}
        self._views = [
            {name: self._view(tensor) for name, tensor in layout.tensors.items()} for layout in layouts
        ]

    def tensors(self, block: int) -> Mapping[str, Tensor]:
        """Returns a block's tensors by name."""
        if block != self._now:
            before, self._now = self._now, block
            if before >= 0:
                self._drop(before)
            if self._ahead and 0 <= (following := 2 * block - before) < len(self._layouts):
                self._advise(following, mmap.MADV_WILLNEED)
        return self._views[block]

    def prefetch(self, block: int) -> None:
        """Does nothing: pages come when they are touched."""

    def _view(self, tensor: StoredTensor) -> Tensor:
        whole, _ = self._mapped(tensor.file.path)
        count = tensor.nbytes // tensor.dtype.itemsize
        return torch.frombuffer(whole, dtype=tensor.dtype, count=count, offset=tensor.offset).view(
            tensor.shape
        )

    def _mapped(self, path: str) -> tuple[mmap.mmap, int]:
        if path not in self._maps:
            descriptor = os.open(path, os.O_RDONLY)
            protection = mmap.PROT_READ | mmap.PROT_WRITE  # else torch warns of memory that cannot be written
            self._maps[path] = mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE, protection), descriptor
        return self._maps[path]

    def _advise(self, block: int, advice: int) -> None:
        for one in self._layouts[block].ranges:
            whole, _ = self._mapped(one.file.path)
            whole.madvise(advice, one.offset, min(one.size, len(whole) - one.offset))

    def _drop(self, block: int) -> None:
        self._advise(block, mmap.MADV_DONTNEED)
        for one in self._layouts[block].ranges:
            _, descriptor = self._mapped(one.file.path)
            os.posix_fadvise(descriptor, one.offset, one.size, os.POSIX_FADV_DONTNEED)


def add_adapters(
    engine: Engine, count: int, rank: int, targets: str | Sequence[str] = ALL_LINEAR
) -> list[str]:
    """Puts adapters `a0`, `a1` and so on on a base, the same on every engine; returns their names."""
    names = [f"a{number}" for number in range(count)]
    chosen = targets if isinstance(targets, str) else list(targets)
    for name in names:
        lora = LoraConfig(r=rank, lora_alpha=rank, target_modules=chosen)
        engine.create_adapter(
            name, lora, OptimConfig(1e-4, "adamw_torch_fused", lr_scheduler_type="constant")
        )
    return names


def random_batch(lengths: Mapping[str, int], vocabulary: int, seed: int = 0) -> dict[str, list[Sample]]:
    """Returns one sequence of random tokens for each adapter, by the adapter's name."""
    generator = torch.Generator().manual_seed(seed)
    rows = {
        name: tuple(torch.randint(vocabulary, (length,), generator=generator).tolist())
        for name, length in lengths.items()
    }
    return {name: [Sample(row, row)] for name, row in rows.items()}


def train(engine: Engine, batch: Mapping[str, Sequence[Sample]]) -> dict[str, float]:
    """Trains all adapters of a batch for one step; returns their losses."""
    found = engine.forward_backward(batch)
    for name in batch:
        engine.optim_step(name)
    return {name: result.loss_sum for name, result in found.items()}


def read_a_step(stream: BlockStream) -> None:
    """Reads the blocks that a forward and a backward pass read, and computes nothing."""
    last = len(stream.layouts)
    for block in [*range(last), *reversed(range(last))]:
        stream.tensors(block)


def reads_of_a_step(stream: BlockStream) -> tuple[int, int]:
    """Returns how many blocks, and bytes, `read_a_step` reads once blocks have stayed from a step before."""
    read_a_step(stream)
    before = stream.loads
    read_a_step(stream)
    size = max(sum(one.size for one in layout.ranges) for layout in stream.layouts)
    return stream.loads - before, (stream.loads - before) * size


def check_direct(stream: BlockStream) -> None:
    """Raises OSError if the files are read through the page cache, which is not the disk's speed."""
    for layout in stream.layouts:
        for one in layout.ranges:
            if not one.file.direct:
                raise OSError(f"{one.file.path}: its file system refuses O_DIRECT; give --folder on another")
