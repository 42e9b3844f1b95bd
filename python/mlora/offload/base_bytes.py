"""Where the bytes of a base model are: in memory for good, in a stream's slots, or in files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BaseBytes:
    """Bytes of a stage's frozen weights and buffers.

    Attributes:
        resident: in memory for good.
        streamed: in files, and read when they are used.
        slots: of the memory that they are read into.
        converted: those of `streamed` that are in scratch files; the others are in the model's own files.
    """

    resident: int
    streamed: int = 0
    slots: int = 0
    converted: int = 0

    @property
    def memory(self) -> int:
        """Bytes in memory."""
        return self.resident + self.slots


def slot_bytes(blocks: Sequence[int], slots: int) -> int:
    """Returns the bytes of a stream's slots, each as large as the largest of the blocks."""
    return min(slots, len(blocks)) * max(blocks, default=0)
