"""The memory of a run: what its limit leaves for tasks, and what they need of it.

On a CPU the limit is on what a process has resident, on a GPU on what its allocator holds. What the base
model and the libraries take is measured once the model is there; what tasks need is predicted by dry runs
before the first step, and then by what micro-batches are measured to need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlora.config import RunConfig
from mlora.crew import PartOptions, count_blocks, spans_of
from mlora.dry_run import DryStage, States
from mlora.engine import Engine
from mlora.measured_cut import held_by
from mlora.needs import largest_lengths, usual_lengths
from mlora.scheduler import MemoryEstimate, Room
from mlora.scheduler.estimate import DryRun
from mlora.scheduler.need import sum_of, within
from mlora.tasks import Task
from mlora_ext.nn.folder import read_config

if TYPE_CHECKING:
    from peft import LoraConfig

MIB = 2**20
RESERVED = 96 * MIB  # what the libraries and the interpreter still take when training has begun
_LEAST_RESERVED = 32 * MIB  # once it has, and the base is known
_WARM = 8  # micro-batches
_TOLD = 8 * MIB  # growth of what is kept that is worth a new decision
_SHORT = 32  # rows of the sequences of dry runs that are many and short


class RunMemory:
    """What tasks may use of a run's memory, and what they need.

    Args:
        config: with a limit on memory.
        engine: with its model, before any adapter.

    Attributes:
        estimate: of micro-batches.
        base: bytes at each place without any task.
    """

    def __init__(self, config: RunConfig, engine: Engine) -> None:
        assert config.scheduler.limit_bytes is not None
        self._config, self._limit = config, config.scheduler.limit_bytes
        self._stages = _dry_stages(config, engine)
        self._held = [-(-held // config.pipeline.micro_batches) for held in held_by(config)]
        self._tasks: dict[str, Task] = {}
        self._keys: dict[str, tuple[tuple[str, int], ...]] = {}
        self._loras: dict[str, LoraConfig] = {}
        self._states: dict[str, tuple[int, ...]] = {}
        self._held_states: dict[str, tuple[int, ...]] = {}
        self.estimate = MemoryEstimate(self._mixture, self._dry_run)
        self.base = engine.used_memory()
        self.reserved = RESERVED
        self._peak = engine.peak_memory
        self._more = self._passed = 0

    def know(self, task: Task) -> None:
        """Look at a task's adapter.

        Args:
            task: new to this run, or to this process.

        Raises:
            ValueError: the adapter cannot be put on the base.
        """
        lora = task.lora or read_config(Path(str(task.config.init_from)))
        states = [stage.states(lora, task.optim) for stage in self._stages]
        self._tasks[task.name], self._loras[task.name] = task, lora
        self._states[task.name] = tuple(_whole(state) for state in states)
        self._held_states[task.name] = tuple(state.weights + state.moments for state in states)

    def states(self, task: Task) -> tuple[int, ...]:
        """Return what a task takes at each place while it is admitted, in bytes."""
        return self._states[task.name]

    def size(self, name: str, lengths: Sequence[int]) -> float:
        """Return what a micro-batch of a task alone needs at most, in bytes, at the place that it fills most.

        Args:
            name: of the task.
            lengths: of its sequences.
        """
        return max(self.estimate.predict({name: lengths}, [name]))

    def room(self) -> Room:
        """Return what tasks may use."""
        free = tuple(self._limit - base - self.reserved for base in self.base)
        return Room(free, tuple(self._held))

    def took(self, tasks: Sequence[Task], foreseen: Sequence[float], peak: int, after: Sequence[int]) -> None:
        """Compare what processes had with what was foreseen: what they keep is the new base, and what they
        took beyond it for a moment is reserved.

        Args:
            tasks: that are on the engine.
            foreseen: bytes of what was under way at each place.
            peak: the most that a stage has had so far, in bytes.
            after: what each stage had after it.
        """
        states = sum_of([self._held_states[task.name] for task in tasks], len(self.base))
        kept = [now - held for now, held in zip(after, states, strict=False)]
        grown = [max(now, base) for now, base in zip(kept, self.base, strict=True)]
        if any(now > base + _TOLD for now, base in zip(grown, self.base, strict=True)):
            self.base = grown
            self.estimate.exceeded = True
        most = max(sum(parts) for parts in zip(self.base, states, foreseen, strict=True))
        if peak > self._peak:
            self._more = max(self._more, int(peak - most))
        self._peak = max(peak, self._peak)
        self._passed += 1
        reserved = max(self._more, RESERVED if self._passed < _WARM else _LEAST_RESERVED)
        if reserved != self.reserved:
            self.reserved = reserved
            self.estimate.exceeded = True

    def state(self) -> dict[str, Any]:
        """Return what was learned, as plain values."""
        return {
            "estimate": self.estimate.state(),
            "reserved": self.reserved,
            "base": list(self.base),
            "more": self._more,
            "passed": self._passed,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave.

        Args:
            state: plain values.
        """
        self.estimate.load_state(state["estimate"])
        self.reserved, self.base = state["reserved"], list(state["base"])
        self._more, self._passed = state["more"], state["passed"]

    def check(self, task: Task) -> None:
        """Refuse a task whose largest micro-batch does not fit even alone.

        Args:
            task: that `know` was told of.

        Raises:
            ValueError: it does not; with the largest batch that would.
        """
        room = self.room()
        budget = room.budget(self.states(task), 1)
        lengths = largest_lengths(task, partial(self.size, task.name))
        if within(self.estimate.activations({task.name: lengths}, [task.name]), budget):
            return
        longest = sorted(lengths, reverse=True)
        fits = [
            count
            for count in range(1, len(longest))
            if within(self.estimate.activations({task.name: longest[:count]}, [task.name]), budget)
        ]
        need = max(
            size + state
            for size, state in zip(
                self.estimate.activations({task.name: lengths}, [task.name]), self.states(task), strict=True
            )
        )
        assert room.free is not None
        what = f"per_device_train_batch_size {fits[-1]} would fit" if fits else "not even one sequence fits"
        raise ValueError(
            f"needs {in_units(need)} for its largest micro-batch of {len(lengths)} sequences with "
            f"{sum(lengths)} tokens, and scheduler.memory_limit leaves {in_units(max(min(room.free), 0))} "
            f"beside the base model; {what}"
        )

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
        shown = list(kinds.values())
        shapes = [_spread(shown, shape) for shape in self._shapes(names)]
        loras = {name: self._loras[name] for name in shown}
        found = [stage.activations(loras, shapes) for stage in self._stages]
        samples = []
        for index, shape in enumerate(shapes):
            lengths = [length for own in shape.values() for length in own]
            samples.append((lengths, [phases[index] for phases in found]))
        return DryRun([stage.knees for stage in self._stages], samples)

    def _shapes(self, names: Sequence[str]) -> list[list[int]]:
        """Short and long sequences, few and many: what tells the coefficients apart."""
        longest = max(max(usual_lengths(self._tasks[name])) for name in names)
        short = max(1, min(_SHORT, longest // 2))
        return [[short] * 4, [short] * 40, [longest], [longest] * 4, [longest] * 12]


def _dry_stages(config: RunConfig, engine: Engine) -> list[DryStage]:
    options = PartOptions(engine.device, engine.dtype, config.gradient_checkpointing, config.pack_base)
    if engine.stages == 1:
        return [DryStage(config.base_model, options)]
    spans = spans_of(engine.blocks, count_blocks(config.base_model))
    return [DryStage(config.base_model, options, span) for span in spans]


def _whole(states: States) -> int:
    """What an adapter takes with the copy that a checkpoint writes, or that its optimizer makes."""
    return states.total + max(states.total, states.update)


def _spread(names: Sequence[str], lengths: Sequence[int]) -> dict[str, list[int]]:
    """Sequences in turn for each task."""
    return {name: list(lengths[place :: len(names)]) for place, name in enumerate(names)}


def in_units(size: float) -> str:
    """Return bytes as ``1.5 GiB`` or ``300 MiB``."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / MIB:.0f} MiB"
