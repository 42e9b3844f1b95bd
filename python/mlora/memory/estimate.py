"""Bounds on the memory of micro-batches, from fits that are adopted at iteration boundaries only."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlora.memory.batch_shape import BatchShape
from mlora.memory.bound import Bound
from mlora.memory.memory_model import PeakModel

_LEARNING = 10  # micro-batches of a mixture that are all measured
_EVERY = 256  # of those that follow, one in so many is
_GROWN = 1.0  # doublings beyond what was seen that are worth a new decision
_REMEMBERED = 4096  # bounds: at a decision the same micro-batches are asked about again and again

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


@dataclass
class Mixture:
    """What is known of a mixture of adapters.

    Args:
        places: a bound for each place.
        longest: rows of the longest sequence that samples were wanted for.
        passed: micro-batches that have passed.
    """

    places: list[Bound]
    longest: int = 0
    passed: int = 0

    def seed(self, found: DryRun) -> None:
        """Take in samples.

        Args:
            found: of this mixture.
        """
        for lengths, places in found.samples:
            for bound, phases in zip(self.places, places, strict=True):
                bound.seed(lengths, phases)

    def predict(self, lengths: Sequence[int]) -> list[int]:
        """Return the bytes that a micro-batch needs at each place; 0 where nothing is known.

        Args:
            lengths: of its sequences.
        """
        return [bound.predict(lengths) for bound in self.places]

    def state(self) -> dict[str, Any]:
        """Return plain values."""
        places = [bound.state() for bound in self.places]
        return {"places": places, "longest": self.longest, "passed": self.passed}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Mixture:
        """Make a mixture again from its `state`.

        Args:
            state: plain values.
        """
        places = [Bound.from_state(place) for place in state["places"]]
        return cls(places, state["longest"], state["passed"])


class MemoryEstimate:
    """Bounds on the memory of micro-batches, at each place.

    Tasks whose adapters lie on different layers, or have different ranks, are not independent: rows of all of
    them are kept where any of them has an adapter. So each *mixture* of adapters has a `PeakModel` of its own
    for each place. A mixture that is new is fitted to dry runs first, and again once sequences come that are
    longer than those. Where there are none, it is taken to need more than there is, and is asked for anew the
    next time.

    All this, and `adopt`, happens where a run decides who is admitted, at iteration boundaries, and what is
    adopted then is written down, so that it can be done again. In between it asks `as_adopted`, which does
    not change.

    Args:
        mixture: names the mixture that tasks make, by their names; what more tasks make takes no less.
        dry_run: runs micro-batches of a mixture dry, with sequences as long as the tasks' longest.
        places: how many there are.

    Attributes:
        stale: whether what was learned since the last `adopt` is worth a new decision: a micro-batch needed
            more than its bound, or was much larger than any that was seen until then.
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
        """Bound a micro-batch's bytes at each place; see `mlora.scheduler.admission.Estimate`."""
        together = _together(lengths)
        key = self._key(among), together
        mixture = self._adopted_of(key[0], among, max(together))
        return self._over(key, mixture) if key[0] in self._adopted else self._unknown()

    def by_samples(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> list[float]:
        """As `activations`, from samples alone, so that it is the same before and after measurements."""
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
        """The same bounds, for which nothing is run."""
        return Adopted(self)

    def predict(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> list[int]:
        """As `activations`, without a margin; 0 where nothing is known."""
        return self._adopted_of(self._key(among), among).predict(_together(lengths))

    def _key(self, among: Sequence[str]) -> str:
        names = tuple(among)
        if names not in self._keys:
            if len(self._keys) >= _REMEMBERED:
                self._keys.clear()
            self._keys[names] = self._mixture(names)
        return self._keys[names]

    def _adopted_of(self, key: str, among: Sequence[str], longest: int = 0) -> Mixture:
        """A mixture as it was adopted, or, where it is new or has no samples as long, as samples say."""
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

    def worth_measuring(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> bool:
        """Count a micro-batch, and say whether it should be measured: early ones, those beyond what was
        measured, and now and then another one.

        Args:
            lengths: of the sequences of each task that takes part in it.
            among: all admitted tasks, of a mixture that was asked about.
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
        """Take in what a micro-batch needed.

        Args:
            lengths: of its sequences.
            among: all tasks that were admitted.
            places: its phases at each place.
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
        """Let `activations` follow what was observed."""
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
        """Return everything that was seen and adopted, as plain values."""
        return {"adopted": _states(self._adopted), "learned": _states(self._learned)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave.

        Args:
            state: plain values.
        """
        self._adopted, self._learned = _mixtures(state["adopted"]), _mixtures(state["learned"])
        self._changed, self._observed = set(self._learned), set(self._learned)
        self._bounds.clear()

    def changes(self) -> dict[str, Any]:
        """Return what was adopted of the mixtures that have changed since the last call, as plain values; of
        all of them after `load_state`."""
        changed, self._changed = sorted(self._changed), set()
        return {key: self._adopted[key].state() for key in changed}

    def load_changes(self, changes: Mapping[str, Any]) -> None:
        """Adopt what was adopted before.

        Args:
            changes: what `changes` gave.
        """
        for mixtures in (self._learned, self._adopted):
            mixtures |= _mixtures(changes)
        self._changed -= set(changes)
        self._observed -= set(changes)
        self._bounds.clear()
        self.stale = False


class Adopted:
    """Bounds of a `MemoryEstimate` that change at boundaries only; see `mlora.scheduler.admission.Estimate`.

    Args:
        estimate: whose.
    """

    def __init__(self, estimate: MemoryEstimate) -> None:
        self._estimate = estimate

    def activations(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> list[float]:
        """As of the estimate; infinite where nothing is known."""
        key = self._estimate._key(among), _together(lengths)
        mixture = self._estimate._adopted.get(key[0])
        return self._estimate._unknown() if mixture is None else self._estimate._over(key, mixture)

    def predict(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> list[int]:
        """As `activations`, without a margin; 0 where nothing is known."""
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
