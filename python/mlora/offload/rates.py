"""Measures what the planner wants to know of a machine without a GPU (LoHan, section IV-B)."""

from __future__ import annotations

import os
import time

import torch

from mlora.offload.buffers import buffer
from mlora.offload.disk import Disk
from mlora.offload.planner.machine import Machine

SIZE = 64 << 20
"""Bytes of one transfer."""
TURNS = 3
"""Of which the median counts."""


def measure_machine(disk: Disk) -> Machine:
    """Returns this machine's rates; writes and reads a scratch file a few times.

    Its FLOP/s are not measured: the seconds of the blocks are. Raises OSError if a folder lacks room.
    """
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
    threads = torch.get_num_threads()
    return Machine(
        flops=1.0,
        read=SIZE / _median(reads),
        write=SIZE / _median(writes),
        one_memory=True,
        cores=max(threads, len(os.sched_getaffinity(0))),
        compute_cores=threads,
        read_seconds=read_seconds / moved,
        write_seconds=write_seconds / moved,
        copy_seconds=_median(copies) / SIZE,
        update_seconds=_median(updates),
    )


def _update_seconds() -> float:
    """Returns the seconds of one thread for each weight of an update."""
    count = 1 << 20
    tensors = [torch.zeros(count, device="cpu") for _ in range(3)]
    gradient, copy = (
        torch.zeros(count, dtype=torch.bfloat16, device="cpu"),
        torch.zeros(count, dtype=torch.bfloat16, device="cpu"),
    )
    begin = time.perf_counter()
    lists = [[tensor] for tensor in (gradient, *tensors, copy)]
    torch.ops.mlora_ext.adamw(*lists, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1, 1.0, False, 1)
    return (time.perf_counter() - begin) / count


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
