"""How much more than predicted a micro-batch may need: little where similar ones were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlora.memory.batch_shape import NOTHING, BatchShape
from mlora.memory.memory_model import PeakModel

SEEDED_MARGIN = 0.04  # of a fit from samples alone, which are within 2%
LEAST_MARGIN = 0.01
PER_DOUBLING = 0.005
"""For each doubling beyond the largest micro-batch seen: x^1.007 outgrows a linear fit by this much."""
_WORST_TIMES = 3.0  # the margin is this many times the worst error seen
_FADES = 0.9  # what each further measurement multiplies the worst error by


@dataclass
class Bound:
    """A `PeakModel` with an error margin.

    Attributes:
        worst: the worst recent relative error of a prediction, too small or too large.
        seeds: the shape that seeds reach.
        measured: the shape that measurements reach.
    """

    model: PeakModel
    worst: float = SEEDED_MARGIN / _WORST_TIMES
    seeds: BatchShape = NOTHING
    measured: BatchShape = NOTHING

    @property
    def seen(self) -> BatchShape:
        """The shape that seeds and measurements reach."""
        return self.seeds.with_(self.measured)

    def beyond(self, shape: BatchShape) -> float:
        """Returns how far a micro-batch lies beyond the measurements, in doublings; 0 within them.

        It may be larger than any of them, or of another form, such as many short sequences where few long
        ones were measured. Only its leverage shows the latter.
        """
        return max(shape.doublings(self.measured), math.log2(max(1.0, self.model.leverage(shape))) / 2)

    def margin(self, shape: BatchShape) -> float:
        """Returns the margin of a prediction, as a share of it.

        Within the measurements it follows the errors seen. From twice as far on it is at least the seeds'
        margin. It grows further where there are no seeds either.
        """
        return self._margin(shape, self.beyond(shape))

    def _margin(self, shape: BatchShape, beyond: float) -> float:
        learned = max(LEAST_MARGIN, _WORST_TIMES * self.worst)
        if not beyond:
            return learned
        return max(learned, SEEDED_MARGIN * min(1.0, beyond)) + PER_DOUBLING * shape.doublings(self.seen)

    def predict(self, lengths: Sequence[int]) -> int:
        """Returns the bytes that a micro-batch needs; 0 if nothing is known."""
        return self.model.predict(lengths) if self.model.known else 0

    def over(self, lengths: Sequence[int]) -> float:
        """Returns the most bytes that a micro-batch needs; infinite if nothing is known.

        Beyond the measurements this is no less than what seeds alone say.
        """
        if not self.model.known:
            return math.inf
        shape = BatchShape.of(lengths)
        size, beyond = self.model.at(shape), self.beyond(shape)
        if beyond:
            size = max(size, self.model.at_by_seeds(shape))
        return (1 + self._margin(shape, beyond)) * size

    def by_samples(self, lengths: Sequence[int]) -> float:
        """Returns the most bytes that a micro-batch needs by seeds alone, whatever was measured since."""
        shape = BatchShape.of(lengths)
        margin = SEEDED_MARGIN + PER_DOUBLING * shape.doublings(self.seeds)
        return (1 + margin) * self.model.at_by_seeds(shape)

    def seed(self, lengths: Sequence[int], phases: Sequence[int]) -> None:
        """Takes in the bytes of a sample's phases."""
        self.model.seed(lengths, phases)
        self.seeds = self.seeds.with_(BatchShape.of(lengths))

    def observe(self, lengths: Sequence[int], phases: Sequence[int]) -> None:
        """Takes in the bytes of a measured micro-batch's phases."""
        error = abs(self.predict(lengths) / max(phases) - 1)
        self.worst = max(error, _FADES * self.worst)
        self.model.observe(lengths, phases)
        self.measured = self.measured.with_(BatchShape.of(lengths))

    def state(self) -> dict[str, Any]:
        """Returns plain values."""
        return {
            "model": self.model.state(),
            "worst": self.worst,
            "seeds": list(self.seeds),
            "measured": list(self.measured),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Bound:
        """Rebuilds a bound from its `state`."""
        model = PeakModel.from_state(state["model"])
        return cls(model, state["worst"], BatchShape(*state["seeds"]), BatchShape(*state["measured"]))
