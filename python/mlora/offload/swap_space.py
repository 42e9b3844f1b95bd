"""Room on disk for activations between a forward and its backward pass."""

from __future__ import annotations

import time
import weakref
from collections import deque
from dataclasses import dataclass

from mlora_ext._C import File, Ticket
from torch import Tensor

from mlora.offload.buffers import Slabs, aligned
from mlora.offload.disk import Disk

CHUNK = 256 << 20
"""Bytes of a scratch file, unless one swapped tensor needs more."""
WRITING = 128 << 20
"""Bytes that wait to be written at once; a swap beyond them waits."""


@dataclass(eq=False)
class _Chunk:
    """A scratch file that is filled from its begin; it is empty again once all that is in it was dropped."""

    file: File
    used: int = 0
    areas: int = 0


class Swapped:
    """Bytes that are on disk, or on their way there or back. Dropping it frees the room.

    Attributes:
        nbytes: how many.
    """

    def __init__(self, space: SwapSpace, content: Tensor) -> None:
        self.nbytes = content.nbytes
        self._space = space
        self._chunk, self._offset = space._room(self.nbytes)
        self._memory: Tensor | None = space.memory.take(self.nbytes)
        self._memory[: self.nbytes].copy_(content)
        self._written: Ticket | None = space.disk.write(self._chunk.file, self._offset, self._memory)
        self._read: Ticket | None = None

    def leave(self) -> None:
        """Waits until it is on disk, and frees its memory. Raises OSError if it cannot be written."""
        written, self._written = self._written, None
        if written is not None:
            self._space.wait(written)
            self._memory = None

    @property
    def is_written(self) -> bool:
        """Whether `leave` need not wait."""
        return self._written is None or self._written.done

    def prefetch(self) -> None:
        """Begins to read it, if it is not in memory; from now on it stays there.

        Raises OSError if it could not be written.
        """
        if self._memory is None:
            self._memory = self._space.memory.take(self.nbytes)
            self._read = self._space.disk.read(self._chunk.file, self._offset, self._memory)
        elif self._written is not None and self._written.done:
            written, self._written = self._written, None
            written.wait()

    def content(self) -> Tensor:
        """Returns the bytes; waits for them. Raises OSError if they cannot be read."""
        self.prefetch()
        assert self._memory is not None
        if self._read is not None:
            self._space.wait(self._read)
            self._read = None
        return self._memory[: self.nbytes]

    def __del__(self) -> None:
        if hasattr(self, "_chunk"):
            self._space._dropped.append((self._chunk, [self._written, self._read]))


class SwapSpace:
    """Scratch files for swapped tensors.

    Args:
        disk: reads and writes them.
        writing: bytes that wait to be written at once.

    Attributes:
        writing: as the argument; may be changed.
        written: bytes swapped out so far.
        waited: seconds that passes have waited for the disk.
    """

    def __init__(self, disk: Disk, *, writing: int = WRITING) -> None:
        self.disk, self.memory = disk, Slabs()
        self.writing = writing
        self.written, self.waited = 0, 0.0
        self._chunks: list[_Chunk] = []
        self._leaving: deque[weakref.ref[Swapped]] = deque()
        self._dropped: deque[tuple[_Chunk, list[Ticket | None]]] = deque()

    def swap_out(self, content: Tensor) -> Swapped:
        """Begins to write bytes to disk; their memory may be used again at once.

        Raises OSError if the disk lacks room, or an earlier write failed.
        """
        self._settle(max(0, self.writing - content.nbytes))
        swapped = Swapped(self, content)
        self._leaving.append(weakref.ref(swapped))
        self.written += swapped.nbytes
        return swapped

    def wait(self, ticket: Ticket) -> None:
        """Waits for a transfer. Raises OSError if it failed."""
        begin = time.perf_counter()
        ticket.wait()
        self.waited += time.perf_counter() - begin

    def _settle(self, bound: int) -> None:
        """Frees the memory of what is written; waits while more bytes than the bound are not."""
        self._free_room()
        alive = deque((ref, swapped) for ref in self._leaving if (swapped := ref()) is not None)
        waiting = sum(swapped.nbytes for _, swapped in alive)
        while alive and (alive[0][1].is_written or waiting > bound):
            _, swapped = alive.popleft()
            swapped.leave()
            waiting -= swapped.nbytes
        self._leaving = deque(ref for ref, _ in alive)

    def _room(self, size: int) -> tuple[_Chunk, int]:
        """Returns a scratch file and an offset in it with room for so many bytes."""
        size = aligned(size)
        chunk = next((c for c in self._chunks if c.used + size <= c.file.size), None)
        if chunk is None:
            chunk = _Chunk(self.disk.scratch(max(size, CHUNK)))
            self._chunks.append(chunk)
        chunk.areas += 1  # first: from here on nothing that is dropped meanwhile empties the chunk
        offset = chunk.used
        chunk.used += size
        return chunk, offset

    def _free_room(self) -> None:
        """Frees the room of what was dropped, unless a transfer of it is under way."""
        for _ in range(len(self._dropped)):
            chunk, tickets = self._dropped.popleft()
            if any(ticket is not None and not ticket.done for ticket in tickets):
                self._dropped.append((chunk, tickets))
                continue
            chunk.areas -= 1
            if chunk.areas == 0:
                chunk.used = 0
