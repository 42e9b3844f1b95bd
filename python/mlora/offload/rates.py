"""How fast a disk, and the processor beside it, are."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from mlora.offload.disk import Disk, buffer

SIZE = 64 << 20
"""Bytes of one transfer."""
TURNS = 3
"""Of which the median counts."""


@dataclass(frozen=True)
class Rates:
    """Measured rates.

    Attributes:
        read, write: bytes per second.
        read_seconds, write_seconds: processor seconds for each byte read or written.
        copy_seconds: processor seconds for each byte copied in memory.
        update_seconds: processor seconds for each weight that AdamW updates.
    """

    read: float
    write: float
    read_seconds: float
    write_seconds: float
    copy_seconds: float
    update_seconds: float


def measure_rates(disk: Disk) -> Rates:
    """Writes and reads a scratch file a few times. Raises OSError if a folder lacks room."""
    file, content = disk.scratch(2 * SIZE), buffer(SIZE)
    other = buffer(SIZE)
    reads, writes, copies, updates = [], [], [], []
    read_seconds = write_seconds = 0.0
    for turn in range(2 * TURNS):
        offset = turn % 2 * SIZE
        begin, used = time.perf_counter(), disk.cpu_seconds
        disk.write(file, offset, content).wait()
        middle, between = time.perf_counter(), disk.cpu_seconds
        disk.read(file, offset, content).wait()
        writes.append(middle - begin)
        reads.append(time.perf_counter() - middle)
        write_seconds += between - used
        read_seconds += disk.cpu_seconds - between
        begin = time.perf_counter()
        other.copy_(content)
        copies.append(time.perf_counter() - begin)
        updates.append(_update_seconds())
    moved = 2 * TURNS * SIZE
    return Rates(
        SIZE / _median(reads),
        SIZE / _median(writes),
        read_seconds / moved,
        write_seconds / moved,
        _median(copies) / SIZE,
        _median(updates),
    )


def _update_seconds() -> float:
    """Returns the seconds of one thread for each weight of an update."""
    count = 1 << 20
    tensors = [torch.zeros(count) for _ in range(3)]
    gradient, copy = torch.zeros(count, dtype=torch.bfloat16), torch.zeros(count, dtype=torch.bfloat16)
    begin = time.perf_counter()
    torch.ops.mlora_ext.adamw(gradient, *tensors, copy, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1, 1.0, 1)
    return (time.perf_counter() - begin) / count


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
