"""The memory of a run: what its limit leaves for tasks, and what they need of it.

On a CPU the limit is on what a process has resident, on a GPU on what its allocator holds. What the base
model and the libraries take is measured once the model is there; what tasks need is predicted by samples
before the first step (dry runs on a CPU), and then by what micro-batches are measured to need.

Whether a task is refused for good depends on what never changes: the base as this process loaded it, and
samples. What a process has taken since only makes a task wait.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mlora.config import RunConfig
from mlora.memory.needs import largest_lengths, with_batches_of
from mlora.memory.task_memory import TaskMemory
from mlora.process.measured_cut import held_by
from mlora.scheduler import Room
from mlora.scheduler.need import sum_of
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
        base: bytes that each stage's process has before any task, but after a small micro-batch, for which
            libraries take what they keep for good.
        peak: the most that one has had until then.
        pieces: bytes that an allocator may hold in pieces too small to be of use; always kept free.
        look: lets each stage give back what nobody uses, and returns what it has in use then, in bytes;
            none = nothing runs.

    Attributes:
        tasks: knows what they need.
        estimate: of micro-batches.
        base: bytes at each place without any task.
        fresh: whether no micro-batch of a task has passed in this process.
        reserved: bytes at each place for what nobody foresees.
    """

    def __init__(
        self,
        config: RunConfig,
        tasks: TaskMemory,
        base: Sequence[int],
        peak: int,
        pieces: int = 0,
        look: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        assert config.scheduler.limit_bytes is not None
        self.tasks, self.base, self.reserved = tasks, list(base), RESERVED + pieces
        self.estimate = tasks.estimate
        self.limit = config.scheduler.limit_bytes
        self._held = tuple(-(-held // config.pipeline.micro_batches) for held in held_by(config))
        self._loaded, self._peak, self._pieces, self._look = list(base), peak, pieces, look
        self._more = self._passed = self._grown = 0
        self.fresh = True

    def room(self) -> Room:
        """Return what tasks may use."""
        return Room(tuple(self.limit - base - self.reserved for base in self.base), self._held)

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
        self.fresh = False
        self._reserve()

    def _reserve(self) -> None:
        warm = self._passed >= _WARM
        still = 0 if warm else RESERVED - self._grown  # what has come of it is part of the base
        reserved = max(self._more, still, _LEAST_RESERVED) + self._pieces
        if reserved != self.reserved:
            self.reserved = reserved
            self.estimate.stale = True

    def look_again(self, tasks: Sequence[Task]) -> None:
        """Let processes give back what nobody uses, and measure the base anew: it may be less than before.
        What was learned in another process is forgotten where nothing has passed in this one.

        Args:
            tasks: that are on the engine; nothing is under way.
        """
        if self._look is None:
            return
        states = sum_of([self.tasks.at_rest(task.name) for task in tasks], len(self.base))
        used = self._look()
        self.base = [max(0, now - held) for now, held in zip(used, states, strict=True)]
        self._grown = max(0, min(now - then for now, then in zip(self.base, self._loaded, strict=True)))
        if self.fresh:
            self._more = self._passed = 0
        self._reserve()

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
        """Refuse a task that does not fit alone beside the base as it was loaded, by samples and with the
        least reserve: whatever is measured later, the answer is the same. A task of which there are no
        samples for now is not refused.

        Args:
            task: that `know` was told of.

        Raises:
            ValueError: it does not; see `refusal`.
        """
        bounds = self._by_samples(task)
        if math.inf not in bounds and not self._within(task, bounds, self._least()):
            raise ValueError(self.refusal(task, as_loaded=True))

    def fits(self, task: Task) -> bool:
        """Say whether a task fits alone, with today's base and reserve.

        Args:
            task: that `know` was told of.
        """
        return self._within(task, self._bounds(task), [base + self.reserved for base in self.base])

    def fits_barely(self, task: Task) -> bool:
        """Say whether a task fits where it is alone and stays alone: growth of the base takes from the least
        reserve, and samples count where measurements have only widened the margin. What `check` lets pass
        does so in a process that has trained nothing.

        Args:
            task: that `know` was told of.
        """
        lengths = {task.name: self.tasks.largest(task)}
        likely = self.estimate.predict(lengths, [task.name])
        known = zip(self._bounds(task), self._by_samples(task), likely, strict=True)
        bounds = [max(min(bound, sampled), size) for bound, sampled, size in known]
        now = [base + self._more + self._pieces for base in self.base]
        return self._within(task, bounds, list(map(max, now, self._least())))

    def _least(self) -> list[int]:
        """What each stage's process has in use at least, beside tasks."""
        return [base + _LEAST_RESERVED + self._pieces for base in self._loaded]

    def _within(self, task: Task, bounds: Sequence[float], taken: Sequence[int]) -> bool:
        parts = zip(bounds, self.tasks.admitted(task.name), taken, strict=True)
        return all(bound + states + used <= self.limit for bound, states, used in parts)

    def _bounds(self, task: Task) -> Sequence[float]:
        return self.estimate.activations({task.name: self.tasks.largest(task)}, [task.name])

    def _by_samples(self, task: Task) -> Sequence[float]:
        return self.estimate.by_samples({task.name: self.tasks.largest(task)}, [task.name])

    def refusal(self, task: Task, *, as_loaded: bool = False) -> str:
        """Say why a task does not fit, and what would: the largest batch, or a limit.

        Args:
            task: that `know` was told of.
            as_loaded: by what `check` goes by, not by what is known today.
        """
        at_base = self._loaded if as_loaded else self.base
        reserved = _LEAST_RESERVED + self._pieces if as_loaded else self.reserved
        bounds = self._by_samples(task) if as_loaded else self._bounds(task)
        states, lengths = self.tasks.admitted(task.name), self.tasks.largest(task)
        taken = (
            f"of scheduler.memory_limit {in_units(self.limit)}, {in_units(max(at_base))} are taken by the "
            f"base model and libraries, and {in_units(reserved)} kept in reserve"
        )
        if math.inf in bounds:
            return (
                f"has {in_units(max(states))} of states; {taken}: too little is left to measure what a "
                "micro-batch of it needs beside the adapters that are there now"
            )
        needs = [size + state for size, state in zip(bounds, states, strict=True)]
        would = max(base + reserved + need for base, need in zip(at_base, needs, strict=True))
        fits = self._most_that_fit(task, len(lengths), [base + reserved for base in at_base])
        what = f"per_device_train_batch_size {fits} or" if fits else "not even one sequence fits;"
        return (
            f"needs {in_units(max(needs))} for its largest micro-batch of {len(lengths)} sequences with "
            f"{sum(lengths)} tokens; {taken}; {what} a limit of {math.ceil(would / MIB)} MiB would do"
        )

    def _most_that_fit(self, task: Task, count: int, taken: Sequence[int]) -> int:
        """The largest batch below `count` with which all micro-batches of a task would fit, or 0."""

        def fits(batch: int) -> bool:
            lengths = largest_lengths(with_batches_of(task, batch), partial(self.tasks.size, task.name))
            return self._within(task, self.estimate.activations({task.name: lengths}, [task.name]), taken)

        return bisect_left(range(1, count), True, key=lambda batch: not fits(batch))


def in_units(size: float) -> str:
    """Return bytes as ``1.50 GiB``, ``300 MiB``, ``20 KiB`` or ``7 bytes``."""
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    if size >= MIB:
        return f"{size / MIB:.0f} MiB"
    return f"{size / 2**10:.0f} KiB" if size >= 2**10 else f"{size:.0f} bytes"
