"""The size of micro-batches, in the terms that their memory depends on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class BatchShape(NamedTuple):
    """The size of micro-batches, in rows.

    Attributes:
        rows: of all sequences.
        squares: squared rows of each sequence, summed.
        longest: rows of the longest sequence.
        even: rows if all sequences are equally long, else 0.
        uneven: rows if they are not, else 0.
        trained: rows with a token after them, which the loss takes.
    """

    rows: int = 0
    squares: int = 0
    longest: int = 0
    even: int = 0
    uneven: int = 0
    trained: int = 0

    @classmethod
    def of(cls, lengths: Sequence[int]) -> BatchShape:
        """Returns the shape of one micro-batch with sequences of these lengths."""
        if not len(lengths) or not (shortest := min(lengths)) >= 1:
            raise ValueError(f"lengths: expected at least one, each of at least 1, got {list(lengths)}")
        rows, longest = sum(lengths), max(lengths)
        even = rows if shortest == longest else 0
        squares = sum([length * length for length in lengths])
        return cls(rows, squares, longest, even, rows - even, rows - len(lengths))

    def with_(self, other: BatchShape) -> BatchShape:
        """Returns the larger of both in each respect."""
        return BatchShape(*map(max, self, other))

    def doublings(self, of: BatchShape) -> float:
        """Returns how often `of` must be doubled to hold this shape; zeros count as 1."""
        return math.log2(max(1.0, *[own / (other or 1) for own, other in zip(self, of, strict=True)]))


NOTHING = BatchShape()
