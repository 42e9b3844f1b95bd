"""How much more than its fit predicts a micro-batch may need: little where others like it were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlora.memory.batch_shape import NOTHING, BatchShape
from mlora.memory.memory_model import PeakModel

SEEDED_MARGIN = 0.04  # of a fit that samples alone have made, which are within 2%
LEAST_MARGIN = 0.01
PER_DOUBLING = 0.005
"""For each doubling beyond the largest micro-batch that was seen: a law of the 1.007th power gains so
much on a fit of the first."""
_WORST_TIMES = 3.0  # the margin is so many times the worst error that was seen
_FADES = 0.9  # of an error's weight, with each measurement that follows


@dataclass
class Bound:
    """A `PeakModel` with an error margin.

    Args:
        model: what predicts.
        worst: the worst relative error of late, by which it predicted too little or too much.
        seeds: shape of the seeds.
        measured: shape of the measurements.
    """

    model: PeakModel
    worst: float = SEEDED_MARGIN / _WORST_TIMES
    seeds: BatchShape = NOTHING
    measured: BatchShape = NOTHING

    @property
    def seen(self) -> BatchShape:
        """What seeds and measurements reach."""
        return self.seeds.with_(self.measured)

    def beyond(self, shape: BatchShape) -> float:
        """Return how far a micro-batch lies beyond what was measured, in doublings; 0 where it does not.

        It may be larger than any, or of another form: many short sequences where few long ones were
        measured. That shows in its leverage only.

        Args:
            shape: of the micro-batch.
        """
        return max(shape.doublings(self.measured), math.log2(max(1.0, self.model.leverage(shape))) / 2)

    def margin(self, shape: BatchShape) -> float:
        """Return what is added to a prediction, as a share.

        It follows the errors that were seen as far as was measured, and is that of the seeds from twice as
        far on. It grows where there are no seeds either.

        Args:
            shape: of a micro-batch.
        """
        return self._margin(shape, self.beyond(shape))

    def _margin(self, shape: BatchShape, beyond: float) -> float:
        learned = max(LEAST_MARGIN, _WORST_TIMES * self.worst)
        if not beyond:
            return learned
        return max(learned, SEEDED_MARGIN * min(1.0, beyond)) + PER_DOUBLING * shape.doublings(self.seen)

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
        shape = BatchShape.of(lengths)
        size, beyond = self.model.at(shape), self.beyond(shape)
        if beyond:
            size = max(size, self.model.at_by_seeds(shape))
        return (1 + self._margin(shape, beyond)) * size

    def by_samples(self, lengths: Sequence[int]) -> float:
        """Return the bytes that a micro-batch needs at most as seeds say, whatever was measured since.

        Args:
            lengths: of its sequences.
        """
        shape = BatchShape.of(lengths)
        margin = SEEDED_MARGIN + PER_DOUBLING * shape.doublings(self.seeds)
        return (1 + margin) * self.model.at_by_seeds(shape)

    def seed(self, lengths: Sequence[int], phases: Sequence[int]) -> None:
        """Take in a sample.

        Args:
            lengths: of a micro-batch's sequences.
            phases: what it is said to need.
        """
        self.model.seed(lengths, phases)
        self.seeds = self.seeds.with_(BatchShape.of(lengths))

    def observe(self, lengths: Sequence[int], phases: Sequence[int]) -> None:
        """Take in a measurement.

        Args:
            lengths: of a micro-batch's sequences.
            phases: what it needed.
        """
        error = abs(self.predict(lengths) / max(phases) - 1)
        self.worst = max(error, _FADES * self.worst)
        self.model.observe(lengths, phases)
        self.measured = self.measured.with_(BatchShape.of(lengths))

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
        return cls(model, state["worst"], BatchShape(*state["seeds"]), BatchShape(*state["measured"]))
