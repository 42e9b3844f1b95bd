"""Bounds on the memory of micro-batches, from fits that are adopted at iteration boundaries only."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlora.scheduler.memory_model import PeakModel

SEEDED_MARGIN = 0.03  # of a fit that dry runs alone have made
LEAST_MARGIN = 0.01
_WORST_TIMES = 3.0  # the margin is so many times the worst error that was seen
_FADES = 0.9  # of an error's weight, with each measurement that follows
_LEARNING = 10  # micro-batches of a mixture that are all measured
_EVERY = 256  # of those that follow, one in so many is
_REMEMBERED = 4096  # predictions: at a decision the same micro-batches are asked about again and again

Phases = Sequence[int]
"""Bytes of each phase of a micro-batch at a place; the largest counts."""


@dataclass(frozen=True)
class DryRun:
    """Micro-batches of a mixture of adapters that never trained anything.

    Args:
        knees: of the `PeakModel` of each place.
        samples: sequence lengths of each, and its phases at each place; none where nothing can be found out
            for now.
    """

    knees: Sequence[Sequence[int | None]]
    samples: Sequence[tuple[Sequence[int], Sequence[Phases]]]


class MemoryEstimate:
    """Bounds on the memory of micro-batches, at each place.

    Tasks whose adapters lie on different layers, or have different ranks, are not independent: rows of all of
    them are kept where any of them has an adapter. So each *mixture* of adapters has a `PeakModel` of its own
    for each place. A mixture that is new is fitted to dry runs first. Where there are none, it is taken to
    need more than there is, and is asked for anew the next time.

    What `activations` says changes in `adopt` only: a run calls it at iteration boundaries and writes down
    what was adopted, so that it can be done again.

    Args:
        mixture: names the mixture that tasks make, by their names; what more tasks make takes no less.
        dry_run: runs micro-batches of a mixture dry.

    Attributes:
        exceeded: whether a micro-batch needed more than its bound since the last `adopt`.
    """

    def __init__(
        self, mixture: Callable[[Sequence[str]], str], dry_run: Callable[[Sequence[str]], DryRun]
    ) -> None:
        self.exceeded = False
        self._mixture, self._dry_run = mixture, dry_run
        self._models: dict[str, list[Bound]] = {}
        self._adopted: dict[str, list[Bound]] = {}
        self._passed: dict[str, int] = {}
        self._predicted: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        self._most: dict[str, list[int]] = {}
        self._keys: dict[tuple[str, ...], str] = {}

    def activations(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> list[float]:
        """Bound a micro-batch's bytes at each place; see `mlora.scheduler.admission.Estimate`."""
        bounds = self._of(among)
        sizes = self._sizes(bounds, lengths, self._key(among))
        return [bound.over(size) for bound, size in zip(bounds, sizes, strict=True)]

    def predict(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> list[int]:
        """As `activations`, without a margin; 0 where nothing is known."""
        return self._sizes(self._of(among), lengths, self._key(among))

    def _sizes(
        self, bounds: Sequence[Bound], lengths: Mapping[str, Sequence[int]], mixture: str
    ) -> list[int]:
        key = mixture, tuple(length for own in lengths.values() for length in own)
        if key in self._predicted:
            return self._predicted[key]
        found = [bound.model.predict(key[1]) if bound.model.known else 0 for bound in bounds]
        if mixture in self._adopted:
            if len(self._predicted) >= _REMEMBERED:
                self._predicted.clear()
            self._predicted[key] = found
        return found

    def _of(self, among: Sequence[str]) -> list[Bound]:
        key = self._key(among)
        if key not in self._adopted:
            models = self._models_of(key, among)
            if key not in self._models:
                return models
            self._adopted[key] = copy.deepcopy(models)
        return self._adopted[key]

    def _key(self, among: Sequence[str]) -> str:
        names = tuple(among)
        if names not in self._keys:
            if len(self._keys) >= _REMEMBERED:
                self._keys.clear()
            self._keys[names] = self._mixture(names)
        return self._keys[names]

    def _models_of(self, key: str, among: Sequence[str]) -> list[Bound]:
        if key not in self._models:
            found = self._dry_run(among)
            models = [PeakModel(knees) for knees in found.knees]
            for lengths, places in found.samples:
                for model, phases in zip(models, places, strict=True):
                    model.seed(lengths, phases)
            bounds = [Bound(model) for model in models]
            if not found.samples:
                return bounds
            self._models[key] = bounds
        return self._models[key]

    def worth_measuring(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> bool:
        """Count a micro-batch, and say whether it should be measured: early ones, those of more rows, or more
        squares of rows, than any before them, and now and then another one.

        Args:
            lengths: of the sequences of each task that takes part in it.
            among: all admitted tasks.
        """
        key = self._key(among)
        passed = self._passed.get(key, 0)
        self._passed[key] = passed + 1
        if self._key(list(lengths)) != key:
            return False
        most = self._most.setdefault(key, [0, 0])
        together = [length for own in lengths.values() for length in own]
        size = [sum(together), sum(length * length for length in together)]
        larger = any(now > before for now, before in zip(size, most, strict=True))
        self._most[key] = [max(pair) for pair in zip(size, most, strict=True)]
        return larger or passed < _LEARNING or passed % _EVERY == 0

    def observe(self, lengths: Sequence[int], among: Sequence[str], places: Sequence[Phases]) -> None:
        """Take in what a micro-batch needed.

        Args:
            lengths: of its sequences.
            among: all tasks that were admitted.
            places: its phases at each place.
        """
        bounds = self.activations({"": lengths}, among)
        self.exceeded |= any(max(phases) > most for phases, most in zip(places, bounds, strict=True))
        for bound, phases in zip(self._models_of(self._key(among), among), places, strict=True):
            bound.observe(lengths, phases)

    def adopt(self) -> None:
        """Let `activations` follow what was observed."""
        self._adopted = copy.deepcopy(self._models)
        self._predicted.clear()
        self.exceeded = False

    def state(self) -> dict[str, Any]:
        """Return everything that was seen and adopted, as plain values."""
        return {
            "adopted": _states(self._adopted),
            "models": _states(self._models),
            "passed": dict(self._passed),
            "most": {key: list(most) for key, most in self._most.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave.

        Args:
            state: plain values.
        """
        self._adopted, self._models = _models(state["adopted"]), _models(state["models"])
        self._passed = dict(state["passed"])
        self._most = {key: list(most) for key, most in state["most"].items()}
        self._predicted.clear()


@dataclass
class Bound:
    """A `PeakModel` with an error margin.

    Args:
        model: what predicts.
        worst: the worst relative error of late, by which it predicted too little or too much.
    """

    model: PeakModel
    worst: float = SEEDED_MARGIN / _WORST_TIMES

    @property
    def margin(self) -> float:
        """What is added to a prediction, as a share."""
        return max(LEAST_MARGIN, _WORST_TIMES * self.worst)

    def over(self, predicted: int) -> float:
        """Bytes that a micro-batch needs at most, as far as is known; infinite where nothing is.

        Args:
            predicted: by the model.
        """
        return (1 + self.margin) * predicted if self.model.known else math.inf

    def observe(self, lengths: Sequence[int], phases: Phases) -> None:
        """Take in a measurement.

        Args:
            lengths: of a micro-batch's sequences.
            phases: what it needed.
        """
        error = abs(self.model.predict(lengths) / max(phases) - 1)
        self.worst = max(error, _FADES * self.worst)
        self.model.observe(lengths, phases)

    def state(self) -> dict[str, Any]:
        """Return plain values."""
        return {"model": self.model.state(), "worst": self.worst}


def _states(models: Mapping[str, Sequence[Bound]]) -> dict[str, Any]:
    return {key: [model.state() for model in places] for key, places in models.items()}


def _models(states: Mapping[str, Any]) -> dict[str, list[Bound]]:
    return {
        key: [Bound(PeakModel.from_state(state["model"]), state["worst"]) for state in places]
        for key, places in states.items()
    }
