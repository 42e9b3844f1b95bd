"""Bounds the memory of micro-batches; new fits are adopted at iteration boundaries only."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlora.memory.model import BatchShape, PeakModel

_LEARNING = 10  # first micro-batches of a mixture, all of which are measured
_EVERY = 256  # of those that follow, one in this many is measured
_GROWN = 1.0  # doublings beyond what was seen that are worth a new decision
_REMEMBERED = 4096  # cached bounds: a decision asks about the same micro-batches again and again

Phases = Sequence[int]
"""Bytes of each phase of a micro-batch at a stage; the largest counts."""


class MemorySample(NamedTuple):
    """What a micro-batch needed beyond the weights, gradients and moments.

    Attributes:
        lengths: of its sequences.
        phases: the most bytes that each stage held at once during forward, loss (0 if it has none) and
            backward, including the neighbouring stages' activations and gradients.
    """

    lengths: Sequence[int]
    phases: Sequence[Phases]


@dataclass
class _Mixture:
    """What is known of a mixture of adapters.

    Attributes:
        places: a model for each stage.
        longest: rows of the longest sequence that samples were asked for.
        passed: micro-batches that have passed.
    """

    places: list[PeakModel]
    longest: int = 0
    passed: int = 0


class MemoryEstimate:
    """Bounds the memory of micro-batches at each stage.

    Tasks are not independent if their adapters are on different layers or have different ranks: a layer keeps
    the rows of all tasks if any of them has an adapter there. So each *mixture* of adapters has its own
    `PeakModel` for each stage. A new mixture is fitted to dry runs first, and again once longer sequences
    come. If a new one has no dry runs now, its bound is infinite, and the next call asks for them again.

    Samples are taken, and `adopt` is called, only where a run decides on admission: at iteration boundaries.
    The run journals what was adopted there, so that it can repeat the decision. In between it asks
    `as_adopted`, which does not change.

    Args:
        mixture: names the mixture that tasks form, given their names. A mixture of more tasks takes no less.
        dry_run: returns samples of a mixture, micro-batches that never trained anything, with sequences as
            long as the tasks' longest; none if nothing can be found out now.
        knees: of each stage's `PeakModel`.

    Attributes:
        stale: whether a new decision is worthwhile. Since the last `adopt` a micro-batch needed more than its
            bound, or was much larger than any before.
    """

    def __init__(
        self,
        mixture: Callable[[Sequence[str]], str],
        dry_run: Callable[[Sequence[str]], Sequence[MemorySample]],
        knees: Sequence[Sequence[int | None]] = ((None,),),
    ) -> None:
        self.stale = False
        self._mixture = mixture
        self._dry_run: Callable[[Sequence[str]], Sequence[MemorySample]] | None = dry_run
        self._learned: dict[str, _Mixture] = {}
        self._adopted: dict[str, _Mixture] = {}
        self._changed: set[str] = set()  # since the last entry
        self._observed: set[str] = set()  # since it was adopted
        self._knees = knees
        self._bounds: dict[tuple[str, tuple[int, ...]], list[float]] = {}
        self._keys: dict[tuple[str, ...], str] = {}
        # the longest sequence for which a mixture could not be sampled since the last `adopt`
        self._missed: dict[str, int] = {}

    @property
    def as_adopted(self) -> MemoryEstimate:
        """The same bounds as adopted last; asking them runs nothing."""
        view = copy.copy(self)
        view._dry_run = None
        return view

    def activations(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> list[float]:
        """Returns an upper bound on a micro-batch's bytes at each stage; see `mlora.scheduler.Bounds`.

        Runs a new mixture dry first. The bound is infinite if nothing is known.

        Args:
            lengths: of the sequences of each task that takes part, by name.
            among: names of all tasks that may take part, including those of `lengths`.
        """
        key = self._key(among), _together(lengths)
        mixture = self._adopted_of(key[0], among, max(key[1]))
        if mixture is None:
            return [math.inf] * len(self._knees)
        if key not in self._bounds:
            if len(self._bounds) >= _REMEMBERED:
                self._bounds.clear()
            self._bounds[key] = [model.over(key[1]) for model in mixture.places]
        return self._bounds[key]

    def by_samples(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> list[float]:
        """Returns `activations` from samples alone: the same before and after measurements."""
        together = _together(lengths)
        mixture = self._adopted_of(self._key(among), among, max(together))
        if mixture is None:
            return [math.inf] * len(self._knees)
        return [model.by_samples(together) for model in mixture.places]

    def predict(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> list[int]:
        """Returns what `activations` returns, but without a margin; 0 if nothing is known."""
        mixture = self._adopted_of(self._key(among), among)
        if mixture is None:
            return [0] * len(self._knees)
        return [model.predict(_together(lengths)) for model in mixture.places]

    def _key(self, among: Sequence[str]) -> str:
        names = tuple(among)
        if names not in self._keys:
            if len(self._keys) >= _REMEMBERED:
                self._keys.clear()
            self._keys[names] = self._mixture(names)
        return self._keys[names]

    def _adopted_of(self, key: str, among: Sequence[str], longest: int = 0) -> _Mixture | None:
        """Returns a mixture as adopted; samples it first if it is new or its samples are too short."""
        known = self._adopted.get(key)
        if self._dry_run is None or (known is not None and longest <= known.longest):
            return known
        if known is not None and longest <= self._missed.get(key, 0):
            return known
        found = self._dry_run(among)
        if not found:
            self._missed[key] = longest
            return known
        new = _Mixture([PeakModel(knees) for knees in self._knees])
        self._bounds.clear()
        for mixtures in (self._learned, self._adopted):
            mixture = mixtures.setdefault(key, copy.deepcopy(new))
            for lengths, places in found:
                for model, phases in zip(mixture.places, places, strict=True):
                    model.seed(lengths, phases)
            mixture.longest = max([longest, *(max(lengths) for lengths, _ in found)])
        self._changed.add(key)
        return self._adopted[key]

    def forget_keys(self) -> None:
        """Asks anew which mixture adapters make: a name may stand for another adapter now."""
        self._keys.clear()

    def worth_measuring(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> bool:
        """Counts a micro-batch of admitted tasks (`among`) and returns whether to measure it.

        Measures a mixture's first micro-batches, those beyond what was measured, and then one in many.
        Micro-batches that form another mixture than `among`, or an unknown one, are not measured.
        """
        key = self._key(among)
        known = self._learned.get(key)
        if known is None:
            return False
        passed, known.passed = known.passed, known.passed + 1
        self._changed.add(key)
        if self._key(list(lengths)) != key:
            return False
        shape = BatchShape.of(_together(lengths))
        new = any(model.beyond(shape) > 0 for model in known.places)
        return new or passed < _LEARNING or passed % _EVERY == 0

    def observe(self, lengths: Sequence[int], among: Sequence[str], places: Sequence[Phases]) -> None:
        """Takes in the bytes of a micro-batch's phases at each stage; `among` names all admitted tasks."""
        key, shape = self._key(among), BatchShape.of(lengths)
        if key not in self._adopted:
            return
        for model, phases in zip(self._adopted[key].places, places, strict=True):
            seen = model.seeds.with_(model.measured)
            self.stale |= max(phases) > model.over(lengths) or shape.doublings(seen) > _GROWN
        for model, phases in zip(self._learned[key].places, places, strict=True):
            model.observe(lengths, phases)
        self._changed.add(key)
        self._observed.add(key)

    def adopt(self) -> None:
        """Lets bounds follow what was observed."""
        for key, mixture in self._learned.items():
            if key in self._observed:
                self._adopted[key] = copy.deepcopy(mixture)
            else:
                self._adopted[key].passed = mixture.passed
        if self._observed:
            self._bounds.clear()
        self._observed = set()
        self._missed.clear()
        self.stale = False

    def state(self) -> dict[str, Any]:
        """Returns everything that was seen and adopted, as plain values."""
        return {"adopted": _states(self._adopted), "learned": _states(self._learned)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state` returned."""
        self._adopted, self._learned = _mixtures(state["adopted"]), _mixtures(state["learned"])
        self._changed, self._observed = set(self._learned), set(self._learned)
        self._bounds.clear()

    def changes(self) -> dict[str, Any]:
        """Returns what was adopted of the mixtures that changed since the last call, as plain values.

        After `load_state` these are all mixtures.
        """
        changed, self._changed = sorted(self._changed), set()
        return _states({key: self._adopted[key] for key in changed})

    def load_changes(self, changes: Mapping[str, Any]) -> None:
        """Adopts what `changes` returned."""
        for mixtures in (self._learned, self._adopted):
            mixtures |= _mixtures(changes)
        self._changed -= set(changes)
        self._observed -= set(changes)
        self._bounds.clear()
        self.stale = False


def _together(lengths: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    return tuple(length for own in lengths.values() for length in own)


def _states(mixtures: Mapping[str, _Mixture]) -> dict[str, Any]:
    return {
        key: {**vars(mixture), "places": [model.state() for model in mixture.places]}
        for key, mixture in mixtures.items()
    }


def _mixtures(states: Mapping[str, Any]) -> dict[str, _Mixture]:
    return {
        key: _Mixture(**{**state, "places": [PeakModel.from_state(place) for place in state["places"]]})
        for key, state in states.items()
    }
