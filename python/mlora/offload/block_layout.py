"""Where the tensors of a block lie in files, and in the buffer that the block is read into."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from mlora_ext._C import File
from torch import Tensor

from mlora.offload.buffers import ALIGN, aligned, buffer
from mlora.offload.disk import Disk


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's bytes in a file: dense, at any offset.

    Attributes:
        scratch: whether the file is a scratch file.
    """

    file: File
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    scratch: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ByteRange:
    """Bytes of a file, from a multiple of `ALIGN` on, and where they go in the buffer."""

    file: File
    offset: int
    size: int
    place: int


class BlockLayout:
    """How a block is read: few ranges of files, each to its place in a buffer of `nbytes`.

    Args:
        tensors: by the name under which `views` returns them.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self.tensors = dict(tensors)
        self.ranges, self.nbytes = _ranges(list(self.tensors.values()))
        self._places = {name: self._place(tensor) for name, tensor in self.tensors.items()}

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Returns the tensors as views of a buffer that the ranges were read into."""
        found = {}
        for name, tensor in self.tensors.items():
            place = self._places[name]
            flat = buffer[place : place + tensor.nbytes].view(tensor.dtype)
            found[name] = flat.view(tensor.shape)
        return found

    def name_at(self, place: int) -> str:
        """Returns the name of the tensor that holds a byte of the buffer."""
        places = self._places.items()
        return next(name for name, first in places if 0 <= place - first < self.tensors[name].nbytes)

    def read(self, disk: Disk) -> Tensor:
        """Returns a new buffer with the block. Raises OSError if it cannot be read."""
        memory = buffer(self.nbytes)
        tickets = [disk.read(one.file, one.offset, memory[one.place :], one.size) for one in self.ranges]
        for ticket in tickets:
            ticket.wait()
        return memory

    def _place(self, tensor: StoredTensor) -> int:
        for one in self.ranges:
            if one.file is tensor.file and one.offset <= tensor.offset <= one.offset + one.size:
                return one.place + tensor.offset - one.offset
        raise AssertionError(f"no range holds offset {tensor.offset}")


def _ranges(tensors: Sequence[StoredTensor]) -> tuple[list[ByteRange], int]:
    """Returns ranges that hold all tensors, merged where they touch, and the bytes of the buffer."""
    found: list[ByteRange] = []
    files = {id(tensor.file): tensor.file for tensor in tensors}
    place = 0
    for file in files.values():
        own = sorted((t for t in tensors if t.file is file), key=lambda t: t.offset)
        begin = end = -1
        for tensor in own:
            first, last = tensor.offset // ALIGN * ALIGN, tensor.offset + tensor.nbytes
            if begin >= 0 and first <= aligned(end):
                end = max(end, last)
                continue
            if begin >= 0:
                found.append(ByteRange(file, begin, end - begin, place))
                place += aligned(end - begin)
            begin, end = first, last
        found.append(ByteRange(file, begin, end - begin, place))
        place += aligned(end - begin)
    return found, place
