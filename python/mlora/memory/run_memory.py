"""The memory of a run: what its limit leaves for tasks, and what they need of it.

On a CPU the limit is on what a process has resident, on a GPU on what its allocator holds. What the base
model and the libraries take is measured once the model is there; what tasks need is predicted by samples
before the first step (dry runs on a CPU), and then by what micro-batches are measured to need.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mlora.config import RunConfig
from mlora.memory.needs import largest_lengths, with_batches_of
from mlora.memory.task_memory import TaskMemory
from mlora.process.measured_cut import held_by
from mlora.scheduler import Room
from mlora.scheduler.need import sum_of, within
from mlora.tasks import Task

MIB = 2**20
RESERVED = 96 * MIB  # what the libraries and the interpreter still take when training begins
_LEAST_RESERVED = 32 * MIB  # once it has, and the base is known
_WARM = 8  # micro-batches
_TOLD = 8 * MIB  # growth of what is kept that is worth a new decision


class RunMemory:
    """What tasks may use of a run's memory, and what they need.

    Args:
        config: with a limit on memory.
        tasks: knows what they need.
        base: bytes that each stage's process has before any task.
        peak: the most that one has had until then.
        pieces: bytes that an allocator may hold in pieces too small to be of use; always kept free.

    Attributes:
        tasks: knows what they need.
        estimate: of micro-batches.
        base: bytes at each place without any task.
        reserved: bytes at each place for what nobody foresees.
    """

    def __init__(
        self, config: RunConfig, tasks: TaskMemory, base: Sequence[int], peak: int, pieces: int = 0
    ) -> None:
        assert config.scheduler.limit_bytes is not None
        self.tasks, self.base, self.reserved = tasks, list(base), RESERVED + pieces
        self.estimate = tasks.estimate
        self.limit = config.scheduler.limit_bytes
        self._held = tuple(-(-held // config.pipeline.micro_batches) for held in held_by(config))
        self._peak, self._pieces = peak, pieces
        self._more = self._passed = self._grown = 0

    def room(self, reserved: int | None = None) -> Room:
        """Return what tasks may use.

        Args:
            reserved: bytes, in place of what is reserved now.
        """
        reserved = self.reserved if reserved is None else reserved
        return Room(tuple(self.limit - base - reserved for base in self.base), self._held)

    def took(self, tasks: Sequence[Task], foreseen: Sequence[float], peak: int, after: Sequence[int]) -> None:
        """Compare what processes had with what was foreseen: what they keep is the new base, and what they
        took beyond it for a moment is reserved.

        Args:
            tasks: that are on the engine.
            foreseen: bytes of what was under way at each place.
            peak: the most that a stage has had so far, in bytes.
            after: what each stage had when nothing was under way any more; empty where something still is.
        """
        states = sum_of([self.tasks.at_rest(task.name) for task in tasks], len(self.base))
        if after:
            kept = [now - held for now, held in zip(after, states, strict=True)]
            grown = [max(now, base) for now, base in zip(kept, self.base, strict=True)]
            if any(now > base + _TOLD for now, base in zip(grown, self.base, strict=True)):
                by = min(now - base for now, base in zip(grown, self.base, strict=True))
                self._grown += by
                self._more = max(0, self._more - by)  # what was seen of it as a peak
                self.base = grown
                self.estimate.stale = True
        most = max(sum(parts) for parts in zip(self.base, states, foreseen, strict=True))
        if peak > max(self._peak, most):
            self._more = max(self._more, int(peak - most))
        self._peak = max(peak, self._peak)
        self._passed += 1
        warm = self._passed >= _WARM
        still = 0 if warm else RESERVED - self._grown  # what has come of it is part of the base
        reserved = max(self._more, still, _LEAST_RESERVED) + self._pieces
        if reserved != self.reserved:
            self.reserved = reserved
            self.estimate.stale = True

    def state(self) -> dict[str, Any]:
        """Return what was learned, as plain values, for a checkpoint."""
        return {"estimate": self.estimate.state(), **self._figures()}

    def entry(self) -> dict[str, Any]:
        """Return what was adopted since the last entry, as plain values, for the journal: fits that have not
        changed would make it grow with the square of their number."""
        return {"changes": self.estimate.changes(), **self._figures()}

    def _figures(self) -> dict[str, Any]:
        return {
            "reserved": self.reserved,
            "base": list(self.base),
            "more": self._more,
            "passed": self._passed,
            "grown": self._grown,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave, or `entry`, in the order in which entries were written.

        Args:
            state: plain values; of other stages than the run has now, it is left out.
        """
        if len(state["base"]) != len(self.base):
            return
        if "estimate" in state:
            self.estimate.load_state(state["estimate"])
        else:
            self.estimate.load_changes(state["changes"])
        self.estimate.stale = False
        self.reserved, self.base = state["reserved"], list(state["base"])
        self._more, self._passed, self._grown = state["more"], state["passed"], state["grown"]

    def check(self, task: Task) -> None:
        """Refuse a task whose largest micro-batch does not fit even alone, whatever becomes of the reserve.

        Args:
            task: that `know` was told of.

        Raises:
            ValueError: it does not; see `refusal`.
        """
        if not self._fits(task, min(self.reserved, _LEAST_RESERVED + self._pieces)):
            raise ValueError(self.refusal(task))

    def fits(self, task: Task) -> bool:
        """Say whether a task fits alone, with today's reserve.

        Args:
            task: that `know` was told of.
        """
        return self._fits(task, self.reserved)

    def _fits(self, task: Task, reserved: int) -> bool:
        budget = self.room(reserved).budget(self.tasks.admitted(task.name), 1)
        lengths = self.tasks.largest(task)
        return within(self.estimate.activations({task.name: lengths}, [task.name]), budget)

    def refusal(self, task: Task) -> str:
        """Say why a task does not fit, and what would: the largest batch, or a limit.

        Args:
            task: that `know` was told of.
        """
        room, states = self.room(), self.tasks.admitted(task.name)
        assert room.free is not None
        base = in_units(max(self.base))
        taken = (
            f"of scheduler.memory_limit {in_units(self.limit)}, {base} are taken by the base model and "
            f"libraries, and {in_units(self.reserved)} kept in reserve"
        )
        lengths = self.tasks.largest(task)
        bounds = self.estimate.activations({task.name: lengths}, [task.name])
        if math.inf in bounds:
            return (
                f"has {in_units(max(states))} of states; {taken}: too little is left to measure what a "
                "micro-batch of it needs beside the adapters that are there now"
            )
        needs = [size + state for size, state in zip(bounds, states, strict=True)]
        would = max(base + self.reserved + need for base, need in zip(self.base, needs, strict=True))
        fits = self._most_that_fit(task, len(lengths), room.budget(states, 1))
        what = f"per_device_train_batch_size {fits} or" if fits else "not even one sequence fits;"
        return (
            f"needs {in_units(max(needs))} for its largest micro-batch of {len(lengths)} sequences with "
            f"{sum(lengths)} tokens; {taken}; {what} a limit of {math.ceil(would / MIB)} MiB would do"
        )

    def _most_that_fit(self, task: Task, count: int, budget: Sequence[float]) -> int:
        """The largest batch below `count` with which all micro-batches of a task would fit, or 0."""

        def fits(batch: int) -> bool:
            lengths = largest_lengths(with_batches_of(task, batch), partial(self.tasks.size, task.name))
            return within(self.estimate.activations({task.name: lengths}, [task.name]), budget)

        return bisect_left(range(1, count), True, key=lambda batch: not fits(batch))


def in_units(size: float) -> str:
    """Return bytes as ``1.50 GiB``, ``300 MiB``, ``20 KiB`` or ``7 bytes``."""
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    if size >= MIB:
        return f"{size / MIB:.0f} MiB"
    return f"{size / 2**10:.0f} KiB" if size >= 2**10 else f"{size:.0f} bytes"
