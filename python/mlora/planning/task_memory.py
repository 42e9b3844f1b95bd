"""What tasks need of the memory of each stage, by samples before they have run and by measurements after.

Samples are micro-batches of each mixture of adapters: run dry where that can be, else measured
(`mlora.planning.measured_samples`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mlora.config.run_config import RunConfig
from mlora.data.record import sequence_lengths
from mlora.engine.stage_group import StageOptions, count_blocks, spans_of
from mlora.memory.estimate import DryRun, Phases
from mlora.planning.dry_run import DryStage, States
from mlora.planning.memory_needs import largest_lengths
from mlora.scheduler import MemoryEstimate
from mlora.tasks.task import Task
from mlora_ext.nn.interop.peft_folder import read_config

if TYPE_CHECKING:
    from peft import LoraConfig

_SHORT = 32  # rows of the sequences of samples that are many and short
LEAST = 2  # rows of a sequence: one that is trained needs a token after it

MemorySample = tuple[Sequence[int], Sequence[Phases]]
"""Lengths of a micro-batch's sequences, and its phases at each stage."""


class MemorySamples(Protocol):
    """Where samples of a mixture come from."""

    def __call__(
        self, loras: Mapping[str, LoraConfig], states: Sequence[int], longest: int
    ) -> Sequence[MemorySample]:
        """Return micro-batches of adapters, and what they take; none where that cannot be found out now.

        Args:
            loras: PEFT's configs by adapter name.
            states: bytes of the adapters' weights and gradients at each stage.
            longest: rows of the longest sequence that they will have.
        """


class TaskMemory:
    """What tasks need at each stage.

    Args:
        stages: of the model, none of which runs.
        samples: of mixtures; default: the stages' dry runs, which serve the CPU.

    Attributes:
        estimate: of micro-batches.
    """

    def __init__(self, stages: Sequence[DryStage], samples: MemorySamples | None = None) -> None:
        self.estimate = MemoryEstimate(self._mixture, self._dry_run, len(stages))
        self._stages = stages
        self._samples = samples or self._dry_samples
        self._loras: dict[str, LoraConfig] = {}
        self._keys: dict[str, tuple[tuple[str, int], ...]] = {}
        self._states: dict[str, list[States]] = {}
        self._longest: dict[str, int] = {}
        self._largest: dict[str, list[int]] = {}

    def know(self, task: Task) -> None:
        """Look at a task's adapter and data.

        Args:
            task: new to this run, or to this process.

        Raises:
            ValueError: the adapter cannot be put on the base.
        """
        lora = task.lora or read_config(Path(str(task.config.init_from)))
        self._states[task.name] = [stage.states(lora, task.optim) for stage in self._stages]
        self._loras[task.name] = lora
        samples = [*task.data.samples, *(task.eval_data.samples if task.eval_data else ())]
        self._longest[task.name] = max(sequence_lengths(samples))

    def knows(self, name: str) -> bool:
        """Say whether `know` was told of a task.

        Args:
            name: of the task.
        """
        return name in self._states

    def admitted(self, name: str) -> tuple[int, ...]:
        """Return the bytes that a task's states need at each stage while it is admitted: with the copy that a
        checkpoint writes, or that its optimizer makes for a moment.

        Args:
            name: of a task that `know` was told of.
        """
        return tuple(state.total + max(state.total, state.update) for state in self._states[name])

    def begun(self, name: str) -> tuple[int, ...]:
        """Return the bytes that a task's weights and gradients take at each stage.

        Args:
            name: of a task that `know` was told of.
        """
        return tuple(state.weights + state.gradients for state in self._states[name])

    def at_rest(self, name: str) -> tuple[int, ...]:
        """Return the bytes that a task's states take at each stage between micro-batches.

        Args:
            name: of a task that `know` was told of.
        """
        return tuple(state.weights + state.moments for state in self._states[name])

    def largest(self, task: Task) -> list[int]:
        """Return the sequence lengths of a task's largest micro-batch.

        Args:
            task: that `know` was told of.
        """
        if task.name in self._largest:
            return self._largest[task.name]
        found = largest_lengths(task, partial(self.size, task.name))
        if self.size(task.name, found):  # else nothing is known yet
            self._largest[task.name] = found
        return found

    def size(self, name: str, lengths: Sequence[int]) -> float:
        """Return what a micro-batch of a task alone needs, in bytes, at the stage where that is most.

        Args:
            name: of the task.
            lengths: of its sequences.
        """
        return max(self.estimate.predict({name: lengths}, [name]))

    def _mixture(self, names: Sequence[str]) -> str:
        """Equal where rows take equally much: by layers that have adapters, and the highest rank there."""
        ranks: dict[str, int] = {}
        for key in {self._key(name) for name in names}:
            for layer, rank in key:
                ranks[layer] = max(rank, ranks.get(layer, 0))
        return hashlib.sha256(repr(sorted(ranks.items())).encode()).hexdigest()[:16]

    def _key(self, name: str) -> tuple[tuple[str, int], ...]:
        if name not in self._keys:
            self._keys[name] = tuple(
                (layer, most)
                for stage in self._stages
                for layer, most, _ in stage.signature([self._loras[name]])
            )
        return self._keys[name]

    def _dry_run(self, names: Sequence[str]) -> DryRun:
        """Of one task for each kind of adapter: how many of a kind there are does not matter."""
        kinds = {self._key(name): name for name in reversed(names)}
        loras = {name: self._loras[name] for name in kinds.values()}
        states = [sum(self.begun(name)[place] for name in loras) for place in range(len(self._stages))]
        longest = max(self._longest[name] for name in names)
        samples = self._samples(loras, states, longest)
        return DryRun([stage.knees for stage in self._stages], samples)

    def _dry_samples(
        self, loras: Mapping[str, LoraConfig], states: Sequence[int], longest: int
    ) -> list[MemorySample]:
        shapes = [spread(list(loras), shape) for shape in seed_shapes(longest)]
        found = [stage.activations(loras, shapes) for stage in self._stages]
        return [
            ([length for own in shape.values() for length in own], [phases[index] for phases in found])
            for index, shape in enumerate(shapes)
        ]


def seed_shapes(longest: int) -> list[list[int]]:
    """Return the sequence lengths of micro-batches: short and long sequences, few and many, alike and mixed,
    which tell the coefficients of a `MemoryModel` apart.

    Args:
        longest: rows of the longest sequence.
    """
    longest = max(LEAST, longest)
    short = max(LEAST, min(_SHORT, longest // 2))
    return [
        [short, longest],
        [short] * 2,
        [short] * 10,
        [longest],
        [longest] * 3,
        [short, longest] * 3,
    ]


def dry_stages(config: RunConfig, options: StageOptions, blocks: Sequence[int] | int = 1) -> list[DryStage]:
    """Return the stages of a run's base model, of which none runs.

    Args:
        config: the run's.
        options: how each would hold its piece.
        blocks: of each stage, or how many stages there are.

    Raises:
        ValueError: the model cannot be loaded, cut, or run dry.
    """
    spans = spans_of(blocks, count_blocks(config.base_model))
    return [DryStage(config.base_model, options, span if len(spans) > 1 else None) for span in spans]


def spread(names: Sequence[str], lengths: Sequence[int]) -> dict[str, list[int]]:
    """Return sequence lengths by adapter name, given to each in turn.

    Args:
        names: of the adapters.
        lengths: of all sequences.
    """
    return {name: list(lengths[place :: len(names)]) for place, name in enumerate(names)}
