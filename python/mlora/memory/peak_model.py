"""The peak of a micro-batch, bounded by a margin: little where similar ones were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mlora.memory.memory_model import NOTHING, BatchShape, MemoryModel

SEEDED_MARGIN = 0.04  # of a fit from samples alone, which are within 2%
LEAST_MARGIN = 0.01
PER_DOUBLING = 0.005
"""For each doubling beyond the largest micro-batch seen: x^1.007 outgrows a linear fit by this much."""
_WORST_TIMES = 3.0  # the margin is this many times the worst error seen
_FADES = 0.9  # what each further measurement multiplies the worst error by


class PeakModel:
    """Predicts a micro-batch's peak on a stage and bounds it by a margin.

    The peak is the largest of the phases, each with its own `MemoryModel` (with pieces, a mask and silent
    rows). The peak itself is no such sum: a short micro-batch peaks in the loss, whose workspace is bounded,
    and a long one in backward.

    Args:
        knees: of each phase's model; None = that phase has no knee.

    Attributes:
        worst: the worst recent relative error of a prediction, too small or too large.
        seeds: the shape that seeds reach.
        measured: the shape that measurements reach.
    """

    def __init__(self, knees: Sequence[int | None] = (None,)) -> None:
        self.models = [MemoryModel(knee, pieces=True, mask=True, silent=True) for knee in knees]
        self.worst = SEEDED_MARGIN / _WORST_TIMES
        self.seeds = self.measured = NOTHING

    @property
    def known(self) -> bool:
        """Whether anything can be predicted."""
        return any(model.count or model.seeded for model in self.models)

    def seed(self, lengths: Sequence[int], phases: Sequence[int]) -> None:
        """Takes in the bytes of a sample's phases; 0 = this stage does not have the phase."""
        for model, size in zip(self.models, phases, strict=True):
            if size:
                model.seed(lengths, size)
        self.seeds = self.seeds.with_(BatchShape.of(lengths))

    def observe(self, lengths: Sequence[int], phases: Sequence[int]) -> None:
        """Takes in the bytes of a measured micro-batch's phases, as `seed` does."""
        error = abs(self.predict(lengths) / max(phases) - 1)
        self.worst = max(error, _FADES * self.worst)
        for model, size in zip(self.models, phases, strict=True):
            if size:
                model.observe(lengths, size)
        self.measured = self.measured.with_(BatchShape.of(lengths))

    def predict(self, lengths: Sequence[int]) -> int:
        """Returns the bytes that a micro-batch needs; 0 if nothing is known."""
        return self._at(BatchShape.of(lengths)) if self.known else 0

    def over(self, lengths: Sequence[int]) -> float:
        """Returns the most bytes that a micro-batch needs; infinite if nothing is known.

        Within the measurements the margin follows the errors seen. From twice as far on it is at least that
        of seeds, and the bound is no less than what seeds alone say. The margin grows further where there are
        no seeds either.
        """
        if not self.known:
            return math.inf
        shape = BatchShape.of(lengths)
        size, beyond = self._at(shape), self.beyond(shape)
        margin = max(LEAST_MARGIN, _WORST_TIMES * self.worst)
        if beyond:
            size = max(size, self._at_by_seeds(shape))
            margin = max(margin, SEEDED_MARGIN * min(1.0, beyond))
            margin += PER_DOUBLING * shape.doublings(self.seeds.with_(self.measured))
        return (1 + margin) * size

    def by_samples(self, lengths: Sequence[int]) -> float:
        """Returns the most bytes that a micro-batch needs by seeds alone, whatever was measured since."""
        shape = BatchShape.of(lengths)
        margin = SEEDED_MARGIN + PER_DOUBLING * shape.doublings(self.seeds)
        return (1 + margin) * self._at_by_seeds(shape)

    def beyond(self, shape: BatchShape) -> float:
        """Returns how far a micro-batch lies beyond the measurements, in doublings; 0 within them.

        It may be larger than any of them, or of another form, such as many short sequences where few long
        ones were measured. Only its leverage shows the latter.
        """
        leverage = max((model.leverage(shape) for model in self.models if model.count), default=math.inf)
        return max(shape.doublings(self.measured), math.log2(max(1.0, leverage)) / 2)

    def _at(self, shape: BatchShape) -> int:
        return max(model.at(shape) for model in self.models if model.count or model.seeded)

    def _at_by_seeds(self, shape: BatchShape) -> int:
        return max([0, *(model.at_by_seeds(shape) for model in self.models if model.seeded)])

    def state(self) -> dict[str, Any]:
        """Returns plain values."""
        models, shapes = [model.state() for model in self.models], [list(self.seeds), list(self.measured)]
        return {"models": models, "worst": self.worst, "seeds": shapes[0], "measured": shapes[1]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PeakModel:
        """Rebuilds a model from its `state`."""
        model = cls()
        model.models = [MemoryModel.from_state(each) for each in state["models"]]
        model.worst = state["worst"]
        model.seeds, model.measured = BatchShape(*state["seeds"]), BatchShape(*state["measured"])
        return model
