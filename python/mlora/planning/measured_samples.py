"""Samples of micro-batches that run for real, for devices whose kernels take no fake tensors.

One adapter of each kind is put on the engine for a moment, and trained on micro-batches that begin with six
rows and grow as far as what was seen bounds the next ones: memory is a sum of terms that are never negative,
`β0 + β1·ΣL + β2·ΣL² + ...`, so none grows by more than the term that grows most.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from mlora.cluster.device import is_out_of_memory
from mlora.data.dataset import Sample
from mlora.engine.engine import Engine
from mlora.optim.optim_config import OptimConfig
from mlora.planning.run_memory import RESERVED
from mlora.planning.task_memory import LEAST, MemorySample, seed_shapes, spread
from mlora_ext.nn import MultiLoRALinear

if TYPE_CHECKING:
    from peft import LoraConfig

PIECES = 32
"""A GPU's allocator cuts segments of 2 MiB and more into blocks; what is left over between them is assumed to
be one part in so many of the limit. Not measured yet."""

_OPTIM = OptimConfig(learning_rate=1.0, total_steps=1)
_SMALLEST = 4  # rows of the longest sequence of the first micro-batches
_CAREFUL = 0.5  # share of what is free that a micro-batch may be bounded by


class MeasuredSamples:
    """Measures mixtures of adapters on an engine; see `mlora.planning.task_memory.MemorySamples`.

    The engine is left as it was: adapters' weights, gradients, moments and counts, random states, and all
    pages but those that the adapters had. Peaks of memory are kept, since the limit holds for these, too.

    Args:
        engine: of one replica.
        limit: bytes that each stage's process may use.
    """

    def __init__(self, engine: Engine, limit: int) -> None:
        self._engine, self._limit = engine, limit
        self._vocabulary = int(engine.registry.config.get_text_config().vocab_size)

    def __call__(
        self, loras: Mapping[str, LoraConfig], states: Sequence[int], longest: int
    ) -> Sequence[MemorySample]:
        """Measure micro-batches of adapters.

        Args:
            loras: PEFT's configs by adapter name.
            states: bytes of the adapters' weights and gradients at each stage.
            longest: rows of the longest sequence that they will have.

        Returns:
            Those of the two largest sizes that were certainly safe, shaped as `seed_shapes` says: at best,
            the larger ones have sequences of `longest` rows. None while batches are under way, and where
            memory is too short even for the smallest.

        Raises:
            ValueError: an adapter cannot be put on the base.
        """
        if not self._engine.idle or min(self._free(states)) <= 0:
            return []
        try:
            with ExitStack() as stack:
                names = [self._put_on(stack, number, lora) for number, lora in enumerate(loras.values())]
                return self._climb(names, max(longest, LEAST))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return []

    def warm_up(self) -> None:
        """Run a micro-batch of six rows, so that libraries take what they keep for good.

        Raises:
            ValueError: the model has no layer for an adapter, or there is no memory even for that.
        """
        from peft import LoraConfig

        layers = [name for name, m in self._engine.registry.named_modules() if isinstance(m, MultiLoRALinear)]
        if not layers:
            raise ValueError("base_model: has no layer that an adapter could be put on")
        target = layers[0].rpartition(".")[2]
        try:
            with ExitStack() as stack:
                name = self._put_on(stack, 0, LoraConfig(r=1, target_modules=[target]))
                self._measure([name], seed_shapes(_SMALLEST)[0])
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError("leaves no room for six rows beside the base model; raise it") from error

    def _put_on(self, stack: ExitStack, number: int, lora: LoraConfig) -> str:
        name = f"measured {number}"  # no task has a name with a space
        self._engine.create_adapter(name, copy.deepcopy(lora), _OPTIM, seed=0)
        stack.callback(self._engine.remove_adapter, name)
        return name

    def _free(self, states: Sequence[int]) -> list[int]:
        """What is free at each stage beside such states and the reserve."""
        used = self._engine.used_memory()
        return [self._limit - RESERVED - now - more for now, more in zip(used, states, strict=True)]

    def _climb(self, names: Sequence[str], longest: int) -> list[MemorySample]:
        """Measure shapes of larger and larger size."""
        smallest = min(_SMALLEST, longest)
        self._measure(names, seed_shapes(smallest)[0])  # makes gradients, and what is kept
        budget = [_CAREFUL * free for free in self._free([0] * self._engine.stages)]
        found: list[MemorySample] = []
        sizes = [smallest]
        while sizes:
            size = sizes[0]
            for shape in seed_shapes(size):
                if found and not _safe(shape, found, budget):
                    return found
                found.append(self._measure(names, shape))
            sizes = [
                larger
                for larger in _halved(longest, size)
                if all(_safe(shape, found, budget) for shape in seed_shapes(larger))
            ]
        return found[-2 * len(seed_shapes(longest)) :]

    def _measure(self, names: Sequence[str], shape: Sequence[int]) -> MemorySample:
        """Run a micro-batch forward and backward, all of whose tokens but the first ones are trained."""
        batch = {
            name: [_tokens(length, self._vocabulary) for length in lengths]
            for name, lengths in spread(names, shape).items()
        }
        future = self._engine.start(batch, measure=True, whole=True)
        self._engine.finish(future)
        (measured,) = future.measured
        return [length for own in measured.lengths.values() for length in own], measured.phases


def _tokens(length: int, vocabulary: int) -> Sample:
    ids = tuple(place % vocabulary for place in range(length))
    return Sample(ids, ids)


def _halved(longest: int, size: int) -> list[int]:
    """`longest`, its half, and so on, as far as that is more than `size`."""
    found = []
    while longest > size:
        found.append(longest)
        longest = -(-longest // 2)
    return found


def _safe(shape: Sequence[int], found: Sequence[MemorySample], budget: Sequence[float]) -> bool:
    """Whether what was found bounds a shape within a budget, at each stage."""
    bounds = [
        [_growth(lengths, shape) * max(phases) for lengths, phases in ((own, p[place]) for own, p in found)]
        for place in range(len(budget))
    ]
    return all(min(each) <= most for each, most in zip(bounds, budget, strict=True))


def _growth(before: Sequence[int], after: Sequence[int]) -> float:
    """How many times what one micro-batch takes another one takes at most, by the terms of `MemoryModel`."""
    if min(before) == max(before) and min(after) < max(after):
        return float("inf")  # of pieces of unequal lengths nothing was seen
    terms = [
        (
            sum(lengths),
            sum(length * length for length in lengths),
            max(lengths) ** 2,
            sum(lengths) - len(lengths),
        )
        for lengths in (before, after)
    ]
    return max(1.0, *(large / small for small, large in zip(*terms, strict=True)))
