"""Bounds the memory of micro-batches; new fits are adopted at iteration boundaries only."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlora.memory.batch_shape import BatchShape
from mlora.memory.bound import Bound
from mlora.memory.memory_model import PeakModel

_LEARNING = 10  # first micro-batches of a mixture, all of which are measured
_EVERY = 256  # of those that follow, one in this many is measured
_GROWN = 1.0  # doublings beyond what was seen that are worth a new decision
_REMEMBERED = 4096  # cached bounds: a decision asks about the same micro-batches again and again

Phases = Sequence[int]
"""Bytes of each phase of a micro-batch at a stage; the largest counts."""


@dataclass(frozen=True)
class DryRun:
    """Samples of a mixture of adapters: micro-batches that never trained anything.

    Attributes:
        knees: of each stage's `PeakModel`.
        samples: sequence lengths of each, and its phases at each stage; empty if nothing can be found out
            now.
    """

    knees: Sequence[Sequence[int | None]]
    samples: Sequence[tuple[Sequence[int], Sequence[Phases]]]


@dataclass
class Mixture:
    """What is known of a mixture of adapters.

    Attributes:
        places: a bound for each stage.
        longest: rows of the longest sequence that samples were asked for.
        passed: micro-batches that have passed.
    """

    places: list[Bound]
    longest: int = 0
    passed: int = 0

    def seed(self, found: DryRun) -> None:
        """Takes in samples."""
        for lengths, places in found.samples:
            for bound, phases in zip(self.places, places, strict=True):
                bound.seed(lengths, phases)

    def predict(self, lengths: Sequence[int]) -> list[int]:
        """Returns the bytes that a micro-batch needs at each stage; 0 if nothing is known."""
        return [bound.predict(lengths) for bound in self.places]

    def state(self) -> dict[str, Any]:
        """Returns plain values."""
        places = [bound.state() for bound in self.places]
        return {"places": places, "longest": self.longest, "passed": self.passed}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Mixture:
        """Rebuilds a mixture from its `state`."""
        places = [Bound.from_state(place) for place in state["places"]]
        return cls(places, state["longest"], state["passed"])


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
        dry_run: runs micro-batches of a mixture dry, with sequences as long as the tasks' longest.
        places: the number of stages.

    Attributes:
        stale: whether a new decision is worthwhile. Since the last `adopt` a micro-batch needed more than its
            bound, or was much larger than any before.
    """

    def __init__(
        self,
        mixture: Callable[[Sequence[str]], str],
        dry_run: Callable[[Sequence[str]], DryRun],
        places: int = 1,
    ) -> None:
        self.stale = False
        self._mixture, self._dry_run = mixture, dry_run
        self._learned: dict[str, Mixture] = {}
        self._adopted: dict[str, Mixture] = {}
        self._changed: set[str] = set()  # since the last entry
        self._observed: set[str] = set()  # since it was adopted
        self._places = places
        self._bounds: dict[tuple[str, tuple[int, ...]], list[float]] = {}
        self._keys: dict[tuple[str, ...], str] = {}

    def activations(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> list[float]:
        """Returns an upper bound on a micro-batch's bytes at each stage; see `mlora.scheduler.Bounds`.

        Runs a new mixture dry first. The bound is infinite if nothing is known.

        Args:
            lengths: of the sequences of each task that takes part, by name.
            among: names of all tasks that may take part, including those of `lengths`.
        """
        together = _together(lengths)
        key = self._key(among), together
        mixture = self._adopted_of(key[0], among, max(together))
        return self._over(key, mixture) if key[0] in self._adopted else self._unknown()

    def by_samples(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> list[float]:
        """Returns `activations` from samples alone: the same before and after measurements.

        Args:
            lengths: as for `activations`.
            among: as for `activations`.
        """
        together, key = _together(lengths), self._key(among)
        mixture = self._adopted_of(key, among, max(together))
        if key not in self._adopted:
            return self._unknown()
        return [bound.by_samples(together) for bound in mixture.places]

    def _unknown(self) -> list[float]:
        return [math.inf] * self._places

    def _over(self, key: tuple[str, tuple[int, ...]], mixture: Mixture) -> list[float]:
        if key not in self._bounds:
            if len(self._bounds) >= _REMEMBERED:
                self._bounds.clear()
            self._bounds[key] = [bound.over(key[1]) for bound in mixture.places]
        return self._bounds[key]

    @property
    def as_adopted(self) -> Adopted:
        """The same bounds as adopted last; asking them runs nothing."""
        return Adopted(self)

    def predict(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> list[int]:
        """Returns the predicted bytes at each stage, without a margin; 0 if nothing is known.

        Args:
            lengths: as for `activations`.
            among: as for `activations`.
        """
        return self._adopted_of(self._key(among), among).predict(_together(lengths))

    def _key(self, among: Sequence[str]) -> str:
        names = tuple(among)
        if names not in self._keys:
            if len(self._keys) >= _REMEMBERED:
                self._keys.clear()
            self._keys[names] = self._mixture(names)
        return self._keys[names]

    def _adopted_of(self, key: str, among: Sequence[str], longest: int = 0) -> Mixture:
        """Returns a mixture as adopted; samples it first if it is new or its samples are too short."""
        known = self._adopted.get(key)
        if known is not None and longest <= known.longest:
            return known
        found = self._dry_run(among)
        new = Mixture([Bound(PeakModel(knees)) for knees in found.knees])
        if known is None and not found.samples:
            return new
        reached = max([longest, *(max(lengths) for lengths, _ in found.samples)])
        self._bounds.clear()
        for mixtures in (self._learned, self._adopted):
            mixture = mixtures.setdefault(key, copy.deepcopy(new))
            mixture.seed(found)
            mixture.longest = reached
        self._changed.add(key)
        return self._adopted[key]

    def forget_keys(self) -> None:
        """Asks anew which mixture adapters make: a name may stand for another adapter now."""
        self._keys.clear()

    def worth_measuring(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> bool:
        """Counts a micro-batch and returns whether to measure it.

        Measures a mixture's first micro-batches, those beyond what was measured, and then one in many.
        Micro-batches that form another mixture than `among` are not measured.

        Args:
            lengths: of the sequences of each task that takes part in it, by name.
            among: names of all admitted tasks; `activations` was asked about their mixture before.
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
        new = any(bound.beyond(shape) > 0 for bound in known.places)
        return new or passed < _LEARNING or passed % _EVERY == 0

    def observe(self, lengths: Sequence[int], among: Sequence[str], places: Sequence[Phases]) -> None:
        """Takes in what a micro-batch needed.

        Args:
            lengths: of its sequences.
            among: names of all tasks that were admitted.
            places: the bytes of its phases at each stage.
        """
        key, shape = self._key(among), BatchShape.of(lengths)
        if key not in self._adopted:
            return
        for bound, phases in zip(self._adopted[key].places, places, strict=True):
            self.stale |= max(phases) > bound.over(lengths) or shape.doublings(bound.seen) > _GROWN
        for bound, phases in zip(self._learned[key].places, places, strict=True):
            bound.observe(lengths, phases)
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
        self.stale = False

    def state(self) -> dict[str, Any]:
        """Returns everything that was seen and adopted, as plain values."""
        return {"adopted": _states(self._adopted), "learned": _states(self._learned)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state` returned.

        Args:
            state: plain values.
        """
        self._adopted, self._learned = _mixtures(state["adopted"]), _mixtures(state["learned"])
        self._changed, self._observed = set(self._learned), set(self._learned)
        self._bounds.clear()

    def changes(self) -> dict[str, Any]:
        """Returns what was adopted of the mixtures that changed since the last call, as plain values.

        After `load_state` these are all mixtures.
        """
        changed, self._changed = sorted(self._changed), set()
        return {key: self._adopted[key].state() for key in changed}

    def load_changes(self, changes: Mapping[str, Any]) -> None:
        """Adopts what was adopted before.

        Args:
            changes: what `changes` returned.
        """
        for mixtures in (self._learned, self._adopted):
            mixtures |= _mixtures(changes)
        self._changed -= set(changes)
        self._observed -= set(changes)
        self._bounds.clear()
        self.stale = False


class Adopted:
    """The bounds of a `MemoryEstimate` as adopted last; see `mlora.scheduler.Bounds`."""

    def __init__(self, estimate: MemoryEstimate) -> None:
        self._estimate = estimate

    def activations(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> list[float]:
        """Returns the estimate's bounds; infinite if nothing is known."""
        key = self._estimate._key(among), _together(lengths)
        mixture = self._estimate._adopted.get(key[0])
        return self._estimate._unknown() if mixture is None else self._estimate._over(key, mixture)

    def predict(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> list[int]:
        """Returns the predicted bytes at each stage, without a margin; 0 if nothing is known."""
        mixture = self._estimate._adopted.get(self._estimate._key(among))
        if mixture is None:
            return [0] * self._estimate._places
        return mixture.predict(_together(lengths))


def _together(lengths: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    return tuple(length for own in lengths.values() for length in own)


def _states(mixtures: Mapping[str, Mixture]) -> dict[str, Any]:
    return {key: mixture.state() for key, mixture in mixtures.items()}


def _mixtures(states: Mapping[str, Any]) -> dict[str, Mixture]:
    return {key: Mixture.from_state(state) for key, state in states.items()}
