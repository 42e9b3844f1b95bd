"""The master weights and moments of AdamW, in a file or in memory.

A parameter's numbers are cut into units. A unit is read, updated and written as one piece: its fp32 weights,
then its first and its second moments (LoHan, arXiv 2403.06504, Table II).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from mlora_ext._C import File, Ticket
from torch import Tensor

from mlora.offload.buffers import aligned, buffer
from mlora.offload.disk import Disk
from mlora.offload.options import UNIT

SMALL = 1 << 15
"""Numbers of a parameter below which its states stay in memory, as those of norms and biases."""


@dataclass(frozen=True)
class Unit:
    """Consecutive numbers of a parameter, from `first` on, and where their states begin in the file."""

    name: str
    first: int
    count: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the states, each of the three at a multiple of `ALIGN`."""
        return 3 * aligned(4 * self.count)

    def views(self, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the weights and the two moments, each `[count]` fp32, as views of their memory."""
        span = aligned(4 * self.count)
        parts = (memory[i * span : i * span + 4 * self.count].view(torch.float32) for i in range(3))
        weights, first, second = parts
        return weights, first, second


def units_of(numbers: Mapping[str, int]) -> dict[str, list[Unit]]:
    """Cuts parameters into units, one behind the other in a file.

    Args:
        numbers: how many each parameter has, by name.
    """
    found: dict[str, list[Unit]] = {}
    offset = 0
    for name, total in numbers.items():
        found[name] = []
        for first in range(0, total, UNIT):
            unit = Unit(name, first, min(UNIT, total - first), offset)
            found[name].append(unit)
            offset += unit.nbytes
    return found


class OptimizerStates:
    """Reads and writes units.

    All files have the same layout.

    Args:
        numbers: how many each parameter has, by name.
        disk: transfers files, and holds the states if they are `on_disk`. Small parameters stay in memory.

    Attributes:
        units: of each parameter, by its name.
        nbytes: of a file with all units.
        largest: bytes of the largest unit on disk.
        memory: bytes of the units that stay in memory.

    Raises:
        OSError: a folder for scratch files is missing, or its disk lacks room.
    """

    def __init__(self, numbers: Mapping[str, int], disk: Disk, *, on_disk: bool) -> None:
        self.units = units_of(numbers)
        self._disk = disk
        everything = self._everything()
        out = [unit for unit in everything if on_disk and numbers[unit.name] >= SMALL]
        self.nbytes = sum(unit.nbytes for unit in everything)
        self.largest = max((unit.nbytes for unit in out), default=0)
        self._memory = {unit: buffer(unit.nbytes) for unit in set(everything) - set(out)}
        self.memory = sum(memory.nbytes for memory in self._memory.values())
        self._target: File | None = disk.scratch(self.nbytes) if out else None
        self._source: dict[Unit, File] = {}

    def _everything(self) -> list[Unit]:
        return [unit for units in self.units.values() for unit in units]

    def in_memory(self, unit: Unit) -> Tensor | None:
        """Returns a unit's states if they stay in memory."""
        return self._memory.get(unit)

    def read(self, unit: Unit, into: Tensor) -> Ticket:
        """Begins to read a unit that is on disk."""
        return self._disk.read(self._source[unit], unit.offset, into, unit.nbytes)

    def write(self, unit: Unit, content: Tensor) -> Ticket:
        """Begins to write a unit that is on disk."""
        assert self._target is not None
        self._source[unit] = self._target
        return self._disk.write(self._target, unit.offset, content, unit.nbytes)

    def put(self, name: str, weights: Tensor) -> None:
        """Sets a parameter's weights, of any dtype, and moments of zeros."""
        flat = weights.reshape(-1)
        for unit in self.units[name]:
            kept = self._memory.get(unit)
            memory = buffer(unit.nbytes) if kept is None else kept
            master, first, second = unit.views(memory)
            master.copy_(flat[unit.first : unit.first + unit.count])
            first.zero_()
            second.zero_()
            if kept is None:
                self.write(unit, memory).wait()

    def save(self, file: File) -> int:
        """Writes all units to a new file, waits until they are on the disk, and returns the file's CRC-32."""
        memory, checksum = buffer(self.largest), 0
        for unit in self._everything():
            content = self._memory.get(unit)
            if content is None:
                content = memory
                self.read(unit, content).wait()
            writing = self._disk.write(file, unit.offset, content, unit.nbytes)
            checksum = zlib.crc32(content[: unit.nbytes].numpy().data, checksum)
            writing.wait()
        file.sync()
        return checksum

    def load(self, file: File) -> Iterator[tuple[Unit, Tensor]]:
        """Takes over the states in a file; yields each unit and its fp32 weights for a moment."""
        memory = buffer(self.largest)
        for unit in self._everything():
            kept = self._memory.get(unit)
            content = memory if kept is None else kept
            self._disk.read(file, unit.offset, content, unit.nbytes).wait()
            if kept is None:
                self.write(unit, content).wait()
            yield unit, unit.views(content)[0]
