"""Measures samples of micro-batches by running them, for devices whose kernels take no fake tensors.

Puts one adapter of each kind on the engine for a moment and trains it. The first micro-batches have six rows.
Later ones grow as far as the earlier measurements bound them: memory is a sum of terms that are never
negative, `β0 + β1·ΣL + β2·ΣL² + ...`, so it grows at most by the factor of the fastest-growing term.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

from mlora.data.micro_batch import BASE
from mlora.data.preference import JointSample
from mlora.data.record import LabelledSample, Sample
from mlora.errors import MemoryLimitError
from mlora.memory.adapter_memory import LEAST, seed_shapes, spread
from mlora.memory.estimate import MemorySample
from mlora.memory.model import SilentRows
from mlora.memory.room import RESERVED
from mlora.model.labels import label_objective
from mlora.objectives.label_losses import LabelObjective
from mlora.objectives.registry import objective_of
from mlora.optim.optim_config import OptimConfig
from mlora_ext import MultiLoRALinear
from mlora_ext.out_of_memory import is_out_of_memory
from mlora_ext.routing.router import router_of

if TYPE_CHECKING:
    from peft import LoraConfig

PIECES = 32
"""One part in `PIECES` of the limit is assumed lost to fragmentation: a GPU's allocator cuts segments of
2 MiB and more into blocks, and gaps remain between them. Not measured yet."""

_OPTIM = OptimConfig(learning_rate=1.0, total_steps=1)
_SMALLEST = 4  # longest sequence of the first micro-batches, in rows
_CAREFUL = 0.5  # share of the free memory that a micro-batch's bound may reach


class MeasuredSamples:
    """Measures mixtures of adapters on an engine; see `mlora.memory.adapter_memory.MemorySamples`.

    Leaves the engine as it was: adapters' weights, gradients, moments and counts, random states, and all
    pages except those that its adapters had. Peaks of memory are kept, since the limit holds for them too.
    `engine` is an `Engine`, whose module imports this one; it must have one replica. `limit` is in bytes per
    stage's process.
    """

    def __init__(self, engine: Any, limit: int) -> None:
        self._engine, self._limit = engine, limit
        self._vocabulary = int(engine.registry.config.get_text_config().vocab_size)

    def __call__(
        self, loras: Mapping[str, LoraConfig], states: Sequence[int], longest: int, silent: bool = False
    ) -> Sequence[MemorySample]:
        """Measures micro-batches shaped as `seed_shapes` says; returns those of the two largest safe sizes.

        At best the larger ones have sequences of `longest` rows. Returns none while batches are under way, or
        if memory is too short even for the smallest. `states` are the bytes of the adapters' weights and
        gradients at each stage. `silent`: some sequences are run without gradient.
        """
        if not self._engine.idle or min(self._free(states)) <= 0:
            return []
        try:
            return self._on_engine(
                loras.values(), lambda names: self._climb(names, max(longest, LEAST), silent)
            )
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return []

    def warm_up(self) -> None:
        """Runs a micro-batch of six rows, so that libraries take what they keep for good."""
        shape = seed_shapes(_SMALLEST)[0]
        try:
            self._on_engine([self.stand_in()], lambda names: [self._measure(names, shape)])
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryLimitError("the base model alone takes it all; raise the limit") from error

    def stand_in(self) -> LoraConfig:
        """Returns the config of the smallest adapter: rank 1 on layers of one name."""
        from peft import LoraConfig

        layers = [name for name, m in self._engine.registry.named_modules() if isinstance(m, MultiLoRALinear)]
        if not layers:
            raise ValueError("base_model: has no layer that an adapter could be put on")
        return LoraConfig(r=1, target_modules=[layers[0].rpartition(".")[2]])

    def _on_engine(
        self, loras: Iterable[LoraConfig], work: Callable[[list[str]], list[MemorySample]]
    ) -> list[MemorySample]:
        """Puts adapters on the engine for a moment; returns what `work` measures."""
        names: list[str] = []
        with ExitStack() as stack:
            for lora in loras:
                names.append(f"measured {len(names)}")  # no task has a name with a space
                self._engine.create_adapter(names[-1], copy.deepcopy(lora), _OPTIM, seed=0)
                stack.callback(self._engine.remove_adapter, names[-1])
            return work(names)

    def _free(self, states: Sequence[int]) -> list[int]:
        """Returns the bytes free at each stage besides `states` and the reserve."""
        used = self._engine.used_memory()
        return [self._limit - RESERVED - now - more for now, more in zip(used, states, strict=True)]

    def _climb(self, names: Sequence[str], longest: int, silent: bool) -> list[MemorySample]:
        """Measures shapes of growing size while they are safe; returns those of the last two sizes."""
        smallest = min(_SMALLEST, longest)
        self._measure(names, seed_shapes(smallest)[0])  # makes the gradients and all else that is kept
        budget = [_CAREFUL * free for free in self._free([0] * self._engine.stages)]
        found: list[MemorySample] = []
        sizes = [smallest]
        while sizes:
            size = sizes[0]
            for shape in seed_shapes(size, silent=silent):
                if found and not _safe(shape, found, budget):
                    return found
                found.append(self._measure(names, shape))
            sizes = [
                larger
                for larger in _halved(longest, size)
                if all(_safe(shape, found, budget) for shape in seed_shapes(larger, silent=silent))
            ]
        return found[-2 * len(seed_shapes(longest, silent=silent)) :]

    def _measure(self, names: Sequence[str], shape: Sequence[int]) -> MemorySample:
        """Runs a micro-batch forward and backward; trains all tokens but each sequence's first."""
        batch: dict[str, list[Any]] = {}
        for name, lengths in spread(names, shape).items():
            objective = self._objective(name)
            live = tuple(self._sample(n, objective) for n in lengths if not isinstance(n, SilentRows))
            silent = tuple((BASE, self._sample(n)) for n in lengths if isinstance(n, SilentRows))
            batch[name] = _joint(live, silent) if silent else list(live)
        future = self._engine.start(batch, measure=True, whole=True)
        self._engine.finish(future)
        (measured,) = future.measured
        return measured

    def _objective(self, name: str) -> LabelObjective | None:
        """Returns the loss of an adapter's labels; None if it predicts tokens."""
        spec = label_objective(router_of(self._engine.registry).adapters[name].config)
        return None if spec is None else cast(LabelObjective, objective_of(spec))

    def _sample(self, length: int, objective: LabelObjective | None = None) -> Sample:
        ids = tuple(place % self._vocabulary for place in range(length))
        if objective is None:
            return Sample(ids, ids)
        if objective.one_row:
            return LabelledSample.of_sequence(ids, 0, *objective.stand_in())
        return LabelledSample(ids, (0,) * length, objective.stand_in())


def _joint(live: Sequence[Sample], silent: tuple[tuple[str, Sample], ...]) -> list[JointSample]:
    """Returns samples of which the first has the silent sequences."""
    if not live:
        return [JointSample((), silent, ())]
    parts = [silent, *[()] * (len(live) - 1)]
    return [JointSample((each,), part, each.facts) for each, part in zip(live, parts, strict=True)]


def _halved(longest: int, size: int) -> list[int]:
    """Returns `longest`, its half (rounded up) and so on, as long as they are more than `size`."""
    found = []
    while longest > size:
        found.append(longest)
        longest = -(-longest // 2)
    return found


def _safe(shape: Sequence[int], found: Sequence[MemorySample], budget: Sequence[float]) -> bool:
    """Whether the measurements bound a shape within the budget at each stage."""
    bounds = [
        [_growth(lengths, shape) * max(phases) for lengths, phases in ((own, p[place]) for own, p in found)]
        for place in range(len(budget))
    ]
    return all(min(each) <= most for each, most in zip(bounds, budget, strict=True))


def _growth(before: Sequence[int], after: Sequence[int]) -> float:
    """Returns the most by which memory can grow between two micro-batches, as a factor, by `MemoryModel`."""
    if min(before) == max(before) and min(after) < max(after):
        return float("inf")  # nothing is known of unequal lengths
    if any(isinstance(length, SilentRows) for length in (*before, *after)):
        live = [[n for n in shape if not isinstance(n, SilentRows)] for shape in (before, after)]
        quiet = [max(1, sum(shape) - sum(own)) for shape, own in zip((before, after), live, strict=True)]
        return max(quiet[1] / quiet[0], _growth(*live))
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
