"""What adapters need at each stage: predicted from samples before they train, from measurements after.

Samples are micro-batches of each mixture of adapters, run dry if possible, else measured
(`mlora.engine.measured_samples`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from mlora.memory.estimate import MemoryEstimate, MemorySample
from mlora.memory.model import SilentRows
from mlora.optim.optim_config import OptimConfig
from mlora_ext.adapters.lora_config import equally_large

if TYPE_CHECKING:
    from peft import LoraConfig

_SHORT = 32  # rows of each sequence in a sample of many short ones
LEAST = 2  # rows of the shortest sequence: a trained row needs a token after it

MemorySamples = Callable[["Mapping[str, LoraConfig]", Sequence[int], int, bool], Sequence[MemorySample]]
"""Returns micro-batches of adapters and what they take; none if that cannot be found out now.

Takes PEFT's configs by adapter name, the bytes of the adapters' weights and gradients at each stage, the
rows of the longest sequence that they will have, and whether some sequences are run without gradient.
"""


Size = Callable[[Sequence[int]], float]
Batches = Callable[[Size, int | None], Sequence[int]]
"""Returns the sequence lengths of an adapter's largest micro-batch by a size, if a batch had at most so many
sequences (None: as many as it has)."""


class StageSizes(Protocol):
    """A stage that tells sizes from shapes alone: `mlora.engine.dry_run.DryStage`."""

    @property
    def knees(self) -> Sequence[int | None]: ...

    def states(self, lora: LoraConfig, optim: OptimConfig) -> States: ...

    def activations(
        self, loras: Mapping[str, LoraConfig], shapes: Sequence[Mapping[str, Sequence[int]]]
    ) -> Sequence[Sequence[int]]: ...


@dataclass(frozen=True)
class States:
    """Bytes that one adapter takes on one stage, whether or not it has a micro-batch there.

    Attributes:
        weights: rounded up to whole pages of the layers' banks; with what a kind of adapter keeps beside
            them, such as DoRA's norms.
        update: what the optimizer takes during an update and then gives back.
        ranks: the rank of each adapted layer or parameter; of one whose kind is not plain LoRA a second time,
            under its name and kind.
    """

    weights: int
    gradients: int
    moments: int
    update: int
    ranks: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """The most that the adapter holds between updates."""
        return self.weights + self.gradients + self.moments


@dataclass
class _Known:
    """An adapter: its config, its states at each stage, and the rows of its longest sequence."""

    lora: LoraConfig
    states: list[States]
    longest: int
    silent: bool = False  # whether it has sequences that are run without gradient, such as references
    start: str | None = None  # what it began with, if that stays beside it
    batches: Batches | None = None
    largest: Sequence[int] = ()  # once something is known of its mixture

    @property
    def beside(self) -> tuple[int, ...]:
        """Bytes at each stage of the weights that it began with, if they stay."""
        return tuple(0 if self.start is None else state.weights for state in self.states)

    @cached_property
    def key(self) -> tuple[tuple[str, int], ...]:
        """Equal for adapters of one kind: the adapted layers and their ranks."""
        return tuple(rank for state in self.states for rank in state.ranks)


class AdapterMemory:
    """What adapters need at each stage; `samples` defaults to dry runs of the stages, which serve the CPU."""

    def __init__(self, stages: Sequence[StageSizes], samples: MemorySamples | None = None) -> None:
        self.estimate = MemoryEstimate(self._mixture, self._dry_run, [stage.knees for stage in stages])
        self._stages = stages
        self._samples = samples or self._dry_samples
        self._known: dict[str, _Known] = {}

    def know(
        self,
        name: str,
        lora: LoraConfig,
        optim: OptimConfig,
        longest: int,
        *,
        silent: bool = False,
        start: str | None = None,
        trained: bool = True,
        batches: Batches | None = None,
    ) -> None:
        """Takes in an adapter whose longest sequence will have `longest` rows; most other methods need this.

        One of EVA counts with the most ranks that it can get. `silent`: some of its sequences are run
        without gradient. `start`: names the weights that it began with, if they stay beside it; adapters
        with the same ones share them. `trained`: whether it has gradients and an optimizer. `batches`: of
        its data; `largest` needs them.

        Raises ValueError if the adapter cannot be put on the base.
        """
        lora = equally_large(lora)
        states = [stage.states(lora, optim) for stage in self._stages]
        if not trained:
            states = [replace(state, gradients=0, moments=0, update=0) for state in states]
        self._known[name] = _Known(lora, states, longest, silent, start, batches)
        self.estimate.forget_keys()

    def forget(self, name: str) -> None:
        """Drops an adapter; what was learned of mixtures like its own stays."""
        self._known.pop(name, None)
        self.estimate.forget_keys()

    def expect(self, name: str, longest: int) -> None:
        """Says that an adapter's sequences will have up to `longest` rows."""
        self._known[name].longest = max(longest, self._known[name].longest)

    def knows(self, name: str) -> bool:
        """Whether `know` was told of an adapter."""
        return name in self._known

    def admitted(self, name: str) -> tuple[int, ...]:
        """Returns the bytes of an adapter's states at each stage while it is admitted.

        That includes the copy that a checkpoint writes, or what the optimizer takes for a moment if that is
        more.
        """
        return self._with_those_beside(name, lambda state: state.total + max(state.total, state.update))

    def begun(self, name: str) -> tuple[int, ...]:
        """Returns the bytes of an adapter's weights and gradients at each stage."""
        return self._with_those_beside(name, lambda state: state.weights + state.gradients)

    def at_rest(self, names: Sequence[str]) -> tuple[int, ...]:
        """Returns the bytes of some adapters' states at each stage between micro-batches.

        What they share counts once, as it is in memory. Admission counts it for each adapter.
        """
        sizes: list[Sequence[int]] = []
        counted: set[str | None] = {None}
        for known in (self._known[name] for name in names):
            sizes.append([state.total for state in known.states])
            if known.start not in counted:
                counted.add(known.start)
                sizes.append(known.beside)
        return tuple(sum(own[place] for own in sizes) for place in range(len(self._stages)))

    def _with_those_beside(self, name: str, size: Callable[[States], int]) -> tuple[int, ...]:
        known = self._known[name]
        return tuple(size(state) + more for state, more in zip(known.states, known.beside, strict=True))

    def moments(self, name: str) -> tuple[int, ...]:
        """Returns the bytes of an adapter's optimizer states at each stage."""
        return tuple(state.moments for state in self._known[name].states)

    def largest(self, name: str, batch_size: int | None = None) -> Sequence[int]:
        """Returns the sequence lengths of an adapter's largest micro-batch, with at most `batch_size`."""
        known = self._known[name]
        assert known.batches is not None

        def size(lengths: Sequence[int]) -> float:
            return max(self.estimate.predict({name: lengths}, [name]))

        if batch_size is not None:
            return known.batches(size, batch_size)
        if not known.largest:
            found = known.batches(size, None)
            if not size(found):  # nothing is known yet
                return found
            known.largest = found
        return known.largest

    def _mixture(self, names: Sequence[str]) -> str:
        """Returns a key, equal where rows take equal memory: the adapted layers and their highest ranks.

        A layer that any adapter targets saves the rows of all adapters, and their products with the widest A.
        """
        ranks: dict[str, int] = {}
        for key in {self._known[name].key for name in names}:
            for layer, rank in key:
                ranks[layer] = max(rank, ranks.get(layer, 0))
        found = hashlib.sha256(repr(sorted(ranks.items())).encode()).hexdigest()[:16]
        return f"{found}-silent" if self._any_silent(names) else found

    def _any_silent(self, names: Sequence[str]) -> bool:
        return any(self._known[name].silent for name in names)

    def _dry_run(self, names: Sequence[str]) -> Sequence[MemorySample]:
        """Samples one adapter of each kind; how many of a kind there are does not matter."""
        kinds = {self._known[name].key: name for name in reversed(names)}
        loras = {name: self._known[name].lora for name in kinds.values()}
        states = [sum(parts) for parts in zip(*map(self.begun, loras), strict=True)]
        longest = max(self._known[name].longest for name in names)
        return self._samples(loras, states, longest, self._any_silent(names))

    def _dry_samples(
        self, loras: Mapping[str, LoraConfig], states: Sequence[int], longest: int, silent: bool
    ) -> list[MemorySample]:
        shapes = [spread(list(loras), shape) for shape in seed_shapes(longest, silent=silent)]
        found = [stage.activations(loras, shapes) for stage in self._stages]
        return [
            MemorySample([rows for own in shape.values() for rows in own], phases)
            for shape, *phases in zip(shapes, *found, strict=True)
        ]


def seed_shapes(longest: int, *, silent: bool = False) -> list[list[int]]:
    """Returns the sequence lengths of sampled micro-batches: short and long, few and many, alike and mixed.

    Together they tell the coefficients of a `MemoryModel` apart. `longest` is in rows. `silent` adds some
    with sequences that are run without gradient.
    """
    longest = max(LEAST, longest)
    short = max(LEAST, min(_SHORT, longest // 2))
    more = [
        [longest, SilentRows(longest)],
        [*[short] * 2, *map(SilentRows, [short] * 8)],
        [short, longest, *map(SilentRows, [short, longest] * 3)],
    ]
    return more * silent + [
        [short, longest],
        [short] * 2,
        [short] * 10,
        [longest],
        [longest] * 3,
        [short, longest] * 3,
    ]


def spread(names: Sequence[str], lengths: Sequence[int]) -> dict[str, list[int]]:
    """Deals sequence lengths to adapters in turn; returns them by name."""
    return {name: list(lengths[place :: len(names)]) for place, name in enumerate(names)}
