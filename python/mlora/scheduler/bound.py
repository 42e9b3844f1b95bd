"""How much more than its fit predicts a micro-batch may need: little where others like it were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlora.scheduler.memory_model import PeakModel

SEEDED_MARGIN = 0.04  # of a fit that samples alone have made, which are within 2%
LEAST_MARGIN = 0.01
PER_DOUBLING = 0.005
"""For each doubling beyond the largest micro-batch that was seen: a law of the 1.007th power gains so
much on a fit of the first."""
_WORST_TIMES = 3.0  # the margin is so many times the worst error that was seen
_FADES = 0.9  # of an error's weight, with each measurement that follows


class Extent(NamedTuple):
    """How large micro-batches are.

    Args:
        rows: of all sequences.
        squares: of the rows of each sequence, summed.
        longest: rows of the longest sequence.
        even: rows where all sequences are equally long, else 0.
        uneven: rows where they are not, else 0.
    """

    rows: int = 0
    squares: int = 0
    longest: int = 0
    even: int = 0
    uneven: int = 0

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Extent:
        """Return that of one micro-batch.

        Args:
            lengths: of its sequences.
        """
        rows, longest = sum(lengths), max(lengths)
        even = rows if min(lengths) == longest else 0
        return cls(rows, sum([length * length for length in lengths]), longest, even, rows - even)

    def with_(self, other: Extent) -> Extent:
        """Return the larger of both, in each respect.

        Args:
            other: of other micro-batches.
        """
        return Extent(*map(max, self, other))

    def doublings(self, of: Extent) -> float:
        """Return how often another extent has to be doubled to hold this one; what is nothing counts as 1.

        Args:
            of: the other one.
        """
        return math.log2(max(1.0, *(own / (other or 1) for own, other in zip(self, of, strict=True))))


NOTHING = Extent()


@dataclass
class Bound:
    """A `PeakModel` with an error margin.

    Args:
        model: what predicts.
        worst: the worst relative error of late, by which it predicted too little or too much.
        seeds: extent of the seeds.
        measured: extent of the measurements.
    """

    model: PeakModel
    worst: float = SEEDED_MARGIN / _WORST_TIMES
    seeds: Extent = NOTHING
    measured: Extent = NOTHING

    @property
    def seen(self) -> Extent:
        """What seeds and measurements reach."""
        return self.seeds.with_(self.measured)

    def margin(self, extent: Extent) -> float:
        """Return what is added to a prediction, as a share.

        It follows the errors that were seen as far as was measured, and is that of the seeds from twice as
        far on. It grows where there are no seeds either.

        Args:
            extent: of a micro-batch.
        """
        learned = max(LEAST_MARGIN, _WORST_TIMES * self.worst)
        beyond = extent.doublings(self.measured)
        if not beyond:
            return learned
        return max(learned, SEEDED_MARGIN * min(1.0, beyond)) + PER_DOUBLING * extent.doublings(self.seen)

    def predict(self, lengths: Sequence[int]) -> int:
        """Return the bytes that a micro-batch needs; 0 where nothing is known.

        Args:
            lengths: of its sequences.
        """
        return self.model.predict(lengths) if self.model.known else 0

    def over(self, lengths: Sequence[int]) -> float:
        """Return the bytes that a micro-batch needs at most, as far as is known; infinite where nothing is.

        Beyond what was measured that is no less than what seeds alone say.

        Args:
            lengths: of its sequences.
        """
        if not self.model.known:
            return math.inf
        extent, size = Extent.of(lengths), self.model.predict(lengths)
        if extent.doublings(self.measured):
            size = max(size, self.model.predict_by_seeds(lengths))
        return (1 + self.margin(extent)) * size

    def seed(self, lengths: Sequence[int], phases: Sequence[int]) -> None:
        """Take in a sample.

        Args:
            lengths: of a micro-batch's sequences.
            phases: what it is said to need.
        """
        self.model.seed(lengths, phases)
        self.seeds = self.seeds.with_(Extent.of(lengths))

    def observe(self, lengths: Sequence[int], phases: Sequence[int]) -> None:
        """Take in a measurement.

        Args:
            lengths: of a micro-batch's sequences.
            phases: what it needed.
        """
        error = abs(self.predict(lengths) / max(phases) - 1)
        self.worst = max(error, _FADES * self.worst)
        self.model.observe(lengths, phases)
        self.measured = self.measured.with_(Extent.of(lengths))

    def state(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "model": self.model.state(),
            "worst": self.worst,
            "seeds": list(self.seeds),
            "measured": list(self.measured),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Bound:
        """Make a bound again from its `state`.

        Args:
            state: plain values.
        """
        model = PeakModel.from_state(state["model"])
        return cls(model, state["worst"], Extent(*state["seeds"]), Extent(*state["measured"]))
