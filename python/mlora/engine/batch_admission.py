"""Cuts batches into micro-batches: into equal ones, or as small as an engine's memory limit needs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mlora.data.packing import BASE
from mlora.engine.memory_limit import MemoryLimit, in_units
from mlora.errors import MemoryLimitError
from mlora.scheduler import sum_of

T = TypeVar("T")
STAND_IN = "stand-in"  # the adapter whose memory is asked about where the base model is alone
FORESEEN = 256  # rows of a sequence that samples reach from the start
Lengths = Callable[[Sequence[Any]], Sequence[int]]
"""Returns the rows of the sequences of some samples."""


@dataclass(frozen=True)
class MeasuredBatch:
    """What one micro-batch needed beyond the weights, gradients and moments.

    Attributes:
        lengths: of its sequences, by adapter name.
        phases: the most bytes that each stage held at once during forward, loss (0 if it has none) and
            backward, including the neighbouring stages' activations and gradients.
    """

    lengths: Mapping[str, tuple[int, ...]]
    phases: tuple[tuple[int, ...], ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """The most bytes held at once on each stage."""
        return tuple(max(peaks) for peaks in self.phases)


class BatchAdmission:
    """Lets batches into an engine only as micro-batches that fit its memory limit, and learns from them.

    The schedule bounds how many micro-batches a stage holds at once, so those that fit may wait in the
    pipeline. Args: `memory` the limit; `names` returns the adapters on the engine; `look_again` measures the
    memory in use anew, and does nothing while batches are under way.
    """

    def __init__(
        self, memory: MemoryLimit, names: Callable[[], Sequence[str]], look_again: Callable[[], None]
    ) -> None:
        self._memory, self._names, self._look_again = memory, names, look_again
        self._under_way: dict[int, list[Sequence[float]]] = {}

    def check_states(self, name: str) -> None:
        """Raises MemoryLimitError if the states of a new adapter do not fit beside the others'."""
        names = [*self._names(), name]
        if min(self._free(names)) <= 0:
            self._look_again()
        missing = -min(self._free(names))
        if missing >= 0:
            memory = self._memory
            size = max(memory.adapters.admitted(name))
            others = len(names) - 1
            raise MemoryLimitError(
                f"adapter {name!r}: its weights, gradients and optimizer need {in_units(size)} beside "
                f"{others} other adapter{'s' * (others != 1)}; {memory.taken(memory.base, memory.reserved)}; "
                f"remove an adapter, lower its rank, or raise the limit by {in_units(missing)}"
            )

    def cut(
        self, batches: Mapping[Any, Sequence[T]], least: int, lengths: Lengths
    ) -> list[dict[Any, Sequence[T]]]:
        """Cuts a batch into at least `least` micro-batches, as few as fit.

        Raises MemoryLimitError if a single sample does not fit.
        """
        among = self._among(batches, lengths)
        if not any(batches.values()):
            return [dict(batches)]
        found = self._smallest_cut(batches, least, lengths, among)
        if found is None:
            self._look_again()
            found = self._smallest_cut(batches, least, lengths, among)
        if found is None:
            raise MemoryLimitError(self._refusal(batches, lengths, among))
        return found

    def entered(self, number: int, pieces: Iterable[Mapping[Any, Sequence[Any]]], lengths: Lengths) -> None:
        """Counts a batch that has entered, under a number of its own."""
        among = self._known()
        self._under_way[number] = [self._bounds(_rows(piece, lengths), among) for piece in pieces]

    def worth_measuring(self, pieces: Sequence[Mapping[str, Sequence[Any]]], lengths: Lengths) -> bool:
        """Whether to measure the micro-batches of a batch."""
        among = self._known()
        return any([self._memory.estimate.worth_measuring(_rows(piece, lengths), among) for piece in pieces])

    def left(self, number: int) -> None:
        """Counts a batch that has come back, or will not."""
        self._under_way.pop(number, None)

    def passed(self, measured: Sequence[MeasuredBatch], peak: int, after: Sequence[int]) -> None:
        """Learns from a batch that has come back and still counts; see `MemoryLimit.took`."""
        among = self._known()
        for one in measured:
            together = [length for own in one.lengths.values() for length in own]
            self._memory.estimate.observe(together, among, one.phases)
        self._memory.took(self._names(), self._foreseen([]), peak, after)
        if self._memory.estimate.stale:
            self._memory.estimate.adopt()

    def _smallest_cut(
        self, batches: Mapping[Any, Sequence[T]], least: int, lengths: Lengths, among: Sequence[str]
    ) -> list[dict[Any, Sequence[T]]] | None:
        """Doubles the number of pieces until they fit; the last try has one sample a piece."""
        samples = sum(map(len, batches.values()))
        count = least
        while True:
            pieces = cut_batch(batches, count, lengths)
            if self._fit([self._bounds(_rows(piece, lengths), among) for piece in pieces]):
                return pieces
            if count >= samples:
                pieces = [{name: [one]} for name, own in batches.items() for one in own]
                fit = self._fit([self._bounds(_rows(piece, lengths), among) for piece in pieces])
                return pieces if fit else None
            count = min(2 * count, samples)

    def _fit(self, bounds: list[Sequence[float]]) -> bool:
        free = self._free(self._names())
        return all(size <= most for size, most in zip(self._foreseen(bounds), free, strict=True))

    def _foreseen(self, more: list[Sequence[float]]) -> list[float]:
        """Returns the most that micro-batches under way, and some more, take at each stage."""
        every = [bounds for batch in self._under_way.values() for bounds in batch] + more
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

    def _bounds(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> Sequence[float]:
        return self._memory.estimate.activations(lengths, among)

    def _known(self) -> list[str]:
        """Returns the adapters whose mixture the memory model is asked about: all on the engine."""
        return list(self._names()) or [STAND_IN]

    def _among(self, batches: Mapping[Any, Sequence[Any]], lengths: Lengths) -> list[str]:
        """As `_known`, told how long the sequences of a batch are, in steps: each step takes new samples."""
        among = self._known()
        longest = max((rows for own in batches.values() for rows in lengths(own)), default=1)
        reach = FORESEEN
        while reach < longest:
            reach *= 4
        self._memory.adapters.expect(among[0], reach)
        return among

    def _refusal(self, batches: Mapping[Any, Sequence[Any]], lengths: Lengths, among: Sequence[str]) -> str:
        """Returns why not even single samples fit: about the one that needs the most."""
        samples = [{name: [one]} for name, own in batches.items() for one in own]
        rows = [_rows(sample, lengths) for sample in samples]
        needs = [self._bounds(each, among) for each in rows]
        worst = max(range(len(needs)), key=lambda index: max(needs[index]))
        ((name, own),), need, memory = rows[worst].items(), needs[worst], self._memory
        taken, free = memory.taken(memory.base, memory.reserved), self._free(self._names())
        if max(need) == math.inf:
            return (
                f"adapter {name!r}: too little memory is free to measure what a micro-batch needs; {taken}; "
                "call finish for the batches under way, remove an adapter, or raise the limit"
            )
        held = [min(most, len(self._under_way) + 1) for most in memory.room().held]
        missing = max(size * count - most for size, count, most in zip(need, held, free, strict=True))
        return (
            f"adapter {name!r}: a sample of {sum(own)} tokens needs {in_units(max(need))}, but the states of "
            f"{len(self._names())} adapters leave {in_units(max(0, min(free)))}; {taken}; shorten it, remove "
            f"an adapter, or raise the limit by {in_units(max(1, missing))}"
        )


def _rows(piece: Mapping[Any, Sequence[Any]], lengths: Lengths) -> dict[str, Sequence[int]]:
    """Returns sequence lengths by name; an empty sequence, which packing refuses, counts as one row."""
    return {name or BASE: [max(1, rows) for rows in lengths(own)] for name, own in piece.items() if own}


def cut_batch(
    batches: Mapping[Any, Sequence[T]], pieces: int, lengths: Lengths
) -> list[dict[Any, Sequence[T]]]:
    """Returns the samples of all adapters in runs of about as many tokens; leaves empty pieces out.

    A sample belongs to the piece in which its middle lies.
    """
    rows = {name: [sum(lengths([sample])) for sample in samples] for name, samples in batches.items()}
    total = sum(map(sum, rows.values()))
    if pieces == 1 or not total:
        return [dict(batches)]
    cut: dict[int, dict[Any, list[T]]] = {}
    before = 0  # tokens
    for name, samples in batches.items():
        for sample, length in zip(samples, rows[name], strict=True):
            piece = pieces * (2 * before + length) // (2 * total)
            cut.setdefault(piece, {}).setdefault(name, []).append(sample)
            before += length
    return [dict(piece) for piece in cut.values()]
