"""Checks the samples of a batch, and cuts it into micro-batches.

They are equally large, or as small as an engine's memory limit needs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlora.data.micro_batch import BASE
from mlora.data.preference import joined
from mlora.data.record import Sample, sequence_lengths
from mlora.engine.adapter_state import AdapterStates
from mlora.errors import MemoryLimitError, check_kind
from mlora.memory.estimate import MemorySample
from mlora.memory.room import MemoryLimit, in_units, sum_of, within
from mlora.objectives.label_losses import LabelObjective
from mlora.objectives.objective import CrossEntropy, Objective
from mlora.objectives.options import START
from mlora_ext.errors import AdapterError

STAND_IN = "stand-in"  # the adapter whose memory is asked about where the base model is alone
FORESEEN = 256  # rows of a sequence that samples reach from the start
Batch = Mapping[Any, Sequence[Sample]]
"""Samples by adapter name."""


class AdapterLimitError(AdapterError, MemoryLimitError):
    """An adapter, or a sample of it, does not fit into an engine's memory limit."""


class BatchAdmission:
    """Lets batches into an engine only as micro-batches that fit its memory limit, and learns from them.

    The schedule bounds how many micro-batches a stage holds at once, so those that fit may wait in the
    pipeline.
    """

    def __init__(self, memory: MemoryLimit, states: AdapterStates) -> None:
        self._memory, self._states = memory, states

    def check_room(self) -> None:
        """Raises MemoryLimitError if the limit leaves no memory even for the smallest adapter, alone."""
        missing, memory = -min(self._free([STAND_IN])), self._memory
        if missing >= 0:
            more = in_units(max(1, missing))
            raise MemoryLimitError(
                f"nothing is left for adapters: {memory.taken()}; raise the limit by {more}"
            )

    def check_states(self, name: str) -> None:
        """Raises MemoryLimitError if the states of a new adapter do not fit beside the others'."""
        names, memory = [*self._states, name], self._memory
        if min(self._free(names)) <= 0:
            self._look_again()
        missing = -min(self._free(names))
        if missing >= 0:
            size = max(memory.adapters.admitted(name))
            others = len(names) - 1
            raise AdapterLimitError(
                name,
                f"its weights, gradients and optimizer need {in_units(size)} beside "
                f"{others} other adapter{'s' * (others != 1)}; {memory.taken()}; "
                f"remove an adapter, lower its rank, or raise the limit by {in_units(missing)}",
            )

    def cut(self, batches: Batch, least: int) -> list[Batch]:
        """Cuts a batch into at least `least` micro-batches, as few as fit.

        Raises MemoryLimitError if a single sample does not fit.
        """
        among = self._among(batches)
        if not any(batches.values()):
            return [dict(batches)]
        found = self._smallest_cut(batches, least, among)
        if found is None:
            self._look_again()
            found = self._smallest_cut(batches, least, among)
        if found is None:
            raise self._refusal(batches, among)
        return found

    def bounds(self, pieces: Iterable[Batch]) -> list[Sequence[float]]:
        """Returns what each micro-batch of a batch takes at most on each stage, for `BatchFuture.bounds`."""
        return self._bounds(pieces, self._known())

    def worth_measuring(self, pieces: Iterable[Batch]) -> bool:
        """Whether to measure the micro-batches of a batch."""
        among = self._known()
        return any([self._memory.estimate.worth_measuring(_rows(piece), among) for piece in pieces])

    def passed(self, measured: Sequence[MemorySample], peak: int, after: Sequence[int]) -> None:
        """Learns from a batch that has come back and still counts; see `MemoryLimit.took`."""
        among = self._known()
        for one in measured:
            self._memory.estimate.observe(one.lengths, among, one.phases)
        self._memory.took(list(self._states), self._foreseen([]), peak, after)
        if self._memory.estimate.stale:
            self._memory.estimate.adopt()

    def _look_again(self) -> None:
        if not self._states.under_way:
            self._memory.look_again(list(self._states))

    def _smallest_cut(self, batches: Batch, least: int, among: Sequence[str]) -> list[Batch] | None:
        """Doubles the number of pieces until they fit; the last try has one sample a piece."""
        samples = sum(map(len, batches.values()))
        count = least
        while True:
            pieces = cut_batch(batches, count)
            if self._fit(pieces, among):
                return pieces
            if count >= samples:
                pieces = _single(batches)
                return pieces if self._fit(pieces, among) else None
            count = min(2 * count, samples)

    def _fit(self, pieces: Sequence[Batch], among: Sequence[str]) -> bool:
        return within(self._foreseen(self._bounds(pieces, among)), self._free(list(self._states)))

    def _foreseen(self, more: list[Sequence[float]]) -> list[float]:
        """Returns the most that micro-batches under way, and some more, take at each stage."""
        every = [bounds for future in self._states.under_way for bounds in future.bounds] + more
        held = self._memory.room().held
        return [
            max((bounds[place] for bounds in every), default=0.0) * min(most, len(every))
            for place, most in enumerate(held)
        ]

    def _free(self, names: Sequence[str]) -> list[int]:
        """Returns what the states of adapters leave at each stage."""
        room = self._memory.room()
        states = sum_of([self._memory.adapters.admitted(name) for name in names], len(room.held))
        assert room.free is not None
        return [free - used for free, used in zip(room.free, states, strict=True)]

    def _bounds(self, pieces: Iterable[Batch], among: Sequence[str]) -> list[Sequence[float]]:
        return [self._memory.estimate.activations(_rows(piece), among) for piece in pieces]

    def _known(self) -> list[str]:
        """Returns the adapters whose mixture the memory model is asked about: all on the engine."""
        return list(self._states) or [STAND_IN]

    def _among(self, batches: Batch) -> list[str]:
        """As `_known`, told how long the sequences of a batch are, in steps: each step takes new samples."""
        among = self._known()
        longest = max((rows for own in batches.values() for rows in sequence_lengths(own)), default=1)
        reach = FORESEEN
        while reach < longest:
            reach *= 4
        self._memory.adapters.expect(among[0], reach)
        return among

    def _refusal(self, batches: Batch, among: Sequence[str]) -> AdapterLimitError:
        """Returns the error that not even single samples fit: about the one that needs the most."""
        samples, memory = _single(batches), self._memory
        needs = self._bounds(samples, among)
        worst = max(range(len(needs)), key=lambda index: max(needs[index]))
        ((name, own),), need = _rows(samples[worst]).items(), needs[worst]
        taken, free = memory.taken(), self._free(list(self._states))
        if max(need) == math.inf:
            return AdapterLimitError(
                name,
                f"too little memory is free to measure what a micro-batch needs; {taken}; "
                "call finish for the batches under way, remove an adapter, or raise the limit",
            )
        limited = sum(bool(future.bounds) for future in self._states.under_way)
        held = [min(most, limited + 1) for most in memory.room().held]
        missing = max(size * count - most for size, count, most in zip(need, held, free, strict=True))
        return AdapterLimitError(
            name,
            f"a sample of {sum(own)} tokens needs {in_units(max(need))}, but the states of "
            f"{len(self._states)} adapters leave {in_units(max(0, min(free)))}; {taken}; shorten it, remove "
            f"an adapter, or raise the limit by {in_units(max(1, missing))}",
        )


def _single(batches: Batch) -> list[Batch]:
    """Returns micro-batches of one sample each."""
    return [{name: [one]} for name, own in batches.items() for one in own]


def _rows(piece: Batch) -> dict[str, Sequence[int]]:
    """Returns sequence lengths by name; an empty sequence, which packing refuses, counts as one row."""
    return {
        name or BASE: [max(1, rows) for rows in sequence_lengths(own)] for name, own in piece.items() if own
    }


def cut_batch(batches: Batch, pieces: int) -> list[Batch]:
    """Returns the samples of all adapters in runs of about as many tokens; leaves empty pieces out.

    A sample belongs to the piece in which its middle lies.
    """
    total = sum(sample.rows for samples in batches.values() for sample in samples)
    if pieces == 1 or not total:
        return [dict(batches)]
    cut: dict[int, dict[Any, list[Sample]]] = {}
    before = 0  # tokens
    for name, samples in batches.items():
        for sample in samples:
            piece = pieces * (2 * before + sample.rows) // (2 * total)
            cut.setdefault(piece, {}).setdefault(name, []).append(sample)
            before += sample.rows
    return [dict(piece) for piece in cut.values()]


def checked_samples(states: AdapterStates, batches: Batch) -> dict[Any, Sequence[Any]]:
    """Returns what the adapters' samples become for their objectives.

    Raises ValueError for an unknown adapter, samples of the wrong kind, labels that the adapter does not
    predict, or a reference that is not beside it.
    """
    found: dict[Any, Sequence[Any]] = {}
    for name, samples in batches.items():
        objective = CrossEntropy() if name in (None, BASE) else states.of(name).objective
        found[name] = joined(name or BASE, samples, objective)
        _check_reference(states, name, objective)
        _check_labels(name, objective, found[name])
    return found


def check_batches(batches: Any, what: str) -> None:
    """Raises ValueError unless batches are lists by adapter name, of what the message calls `what`."""
    check_kind("batches", batches, f"a dict of lists of {what} by adapter name", Mapping)
    for name, rows in batches.items():
        check_kind(f"adapter {name!r}", rows, f"a list of {what}", Sequence)


def _check_labels(name: str | None, objective: Objective, samples: Sequence[Any]) -> None:
    """Raises ValueError for samples whose labels are not what the adapter predicts."""
    for part in (part for sample in samples for part in sample.sequences):
        if not isinstance(objective, LabelObjective):
            if part.is_labelled:
                raise AdapterError(name, "expected labels that are tokens, got a LabelledSample")
        elif not part.is_labelled:
            raise AdapterError(name, f"expected a LabelledSample, got a {type(part).__name__}")
        elif fault := objective.fault(part.labels, part.facts):
            raise AdapterError(name, fault)


def _check_reference(states: AdapterStates, name: str, objective: Objective) -> None:
    """Raises ValueError if the adapter that an objective compares with is not beside this one."""
    owner = objective.reference
    if owner in (None, BASE, START):
        return
    known = states.get(str(owner))
    if known is None or known.replica != states[name].replica:
        raise AdapterError(
            name,
            f"objective.reference: no adapter {objective.reference!r} on this engine"
            f"{'' if known is None else ' and in its replica'}; create it first",
        )
    if isinstance(known.objective, LabelObjective):
        raise AdapterError(
            name,
            f"objective.reference: {objective.reference!r} is a classifier, which has "
            "no log-probabilities of tokens",
        )
