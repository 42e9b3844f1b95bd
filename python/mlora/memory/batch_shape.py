"""How large micro-batches are: what their memory depends on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class BatchShape(NamedTuple):
    """How large micro-batches are.

    Args:
        rows: of all sequences.
        squares: of the rows of each sequence, summed.
        longest: rows of the longest sequence.
        even: rows where all sequences are equally long, else 0.
        uneven: rows where they are not, else 0.
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
        """Return that of one micro-batch.

        Args:
            lengths: of its sequences.

        Raises:
            ValueError: if there is no sequence, or a length is below 1.
        """
        if not len(lengths) or not (shortest := min(lengths)) >= 1:
            raise ValueError(f"lengths: expected at least one, each of at least 1, got {list(lengths)}")
        rows, longest = sum(lengths), max(lengths)
        even = rows if shortest == longest else 0
        squares = sum([length * length for length in lengths])
        return cls(rows, squares, longest, even, rows - even, rows - len(lengths))

    def with_(self, other: BatchShape) -> BatchShape:
        """Return the larger of both, in each respect.

        Args:
            other: of other micro-batches.
        """
        return BatchShape(*map(max, self, other))

    def doublings(self, of: BatchShape) -> float:
        """Return how often another shape has to be doubled to hold this one; what is nothing counts as 1.

        Args:
            of: the other one.
        """
        return math.log2(max(1.0, *[own / (other or 1) for own, other in zip(self, of, strict=True)]))


NOTHING = BatchShape()
