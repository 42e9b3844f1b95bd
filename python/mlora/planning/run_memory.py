"""What a run's memory limit leaves for tasks, and what tasks need of it.

The limit is on a process's resident memory on a CPU, and on the allocator's memory on a GPU. The base model
and the libraries are measured once the model is loaded. Tasks' needs are predicted from samples before the
first step (dry runs on a CPU), and then from measured micro-batches.

A task is refused for good only by facts that no other process would change: samples, and the smallest base
that any process of the run had when it was loaded. What a process has taken beyond that only makes a task
wait.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mlora.config.run_config import RunConfig
from mlora.planning.measured_cut import held_by
from mlora.planning.memory_needs import largest_lengths, with_batches_of
from mlora.planning.task_memory import TaskMemory
from mlora.scheduler import Room
from mlora.scheduler.memory_need import sum_of
from mlora.tasks.task import Task

MIB = 2**20
RESERVED = 96 * MIB  # what the libraries and the interpreter still take when training begins
_LEAST_RESERVED = 32 * MIB  # the same after training has begun and the base is known
_WARM = 8  # micro-batches after which training has begun
_TOLD = 8 * MIB  # growth of the base that is worth a new decision

Bounds = Callable[[Mapping[str, Sequence[int]], Sequence[str]], Sequence[float]]
"""Bounds a micro-batch's bytes at each stage, as `MemoryEstimate.activations`."""


class RunMemory:
    """What tasks may use of a run's memory, and what they need.

    Args:
        config: with a limit on memory.
        base: bytes of each stage's process before any task, but after a small micro-batch, for which
            libraries take what they keep for good.
        peak: the most bytes that a process has had until then.
        pieces: bytes that an allocator may hold in pieces too small to be of use; always kept free.
        look: makes each stage give back unused memory and returns its bytes in use; None = nothing runs.
        earlier: the bytes of `base` on the first stage that this process's earlier runs left there.

    Attributes:
        base: bytes at each stage without any task.
        fresh: whether no micro-batch of a task has passed in this process.
        reserved: bytes kept free at each stage for needs that nobody foresees.
    """

    def __init__(
        self,
        config: RunConfig,
        tasks: TaskMemory,
        base: Sequence[int],
        peak: int,
        pieces: int = 0,
        look: Callable[[], Sequence[int]] | None = None,
        earlier: int = 0,
    ) -> None:
        assert config.scheduler.limit_bytes is not None
        self.tasks, self.base, self.reserved = tasks, list(base), RESERVED + pieces
        self.estimate = tasks.estimate
        self.limit = config.scheduler.limit_bytes
        self._held = tuple(-(-held // config.pipeline.micro_batches) for held in held_by(config))
        self._loaded, self._peak, self._pieces, self._look = list(base), peak, pieces, look
        self._smallest = [max(0, base[0] - earlier), *base[1:]]  # of the run's processes, as loaded
        self._more = self._passed = self._grown = 0
        self.fresh = True

    def room(self) -> Room:
        """Returns what tasks may use."""
        return Room(tuple(self.limit - base - self.reserved for base in self.base), self._held)

    def took(self, tasks: Sequence[Task], foreseen: Sequence[float], peak: int, after: Sequence[int]) -> None:
        """Compares processes' memory with the prediction: what they keep joins the base, peaks are reserved.

        Args:
            tasks: those on the engine.
            foreseen: predicted bytes of what was under way, at each stage.
            peak: the most bytes that a stage has had so far.
            after: bytes of each stage once nothing was under way; empty while something is.
        """
        states = sum_of([self.tasks.at_rest(task.name) for task in tasks], len(self.base))
        if after:
            kept = [now - held for now, held in zip(after, states, strict=True)]
            grown = [max(now, base) for now, base in zip(kept, self.base, strict=True)]
            if any(now > base + _TOLD for now, base in zip(grown, self.base, strict=True)):
                by = min(now - base for now, base in zip(grown, self.base, strict=True))
                self._grown += by
                self._more = max(0, self._more - by)  # this part was seen as a peak before
                self.base = grown
                self.estimate.stale = True
        most = max(sum(parts) for parts in zip(self.base, states, foreseen, strict=True))
        if peak > max(self._peak, most):
            self._more = max(self._more, int(peak - most))
        self._peak = max(peak, self._peak)
        self._passed += 1
        self.fresh = False
        self.estimate.stale |= self._reserve()

    def _reserve(self) -> bool:
        """Sets the reserve for what is still to come; returns whether it changed."""
        warm = self._passed >= _WARM
        still = 0 if warm else RESERVED - self._grown  # what was taken since is part of the base
        reserved = max(self._more, still, _LEAST_RESERVED) + self._pieces
        changed, self.reserved = reserved != self.reserved, reserved
        return changed

    def look_again(self, tasks: Sequence[Task]) -> None:
        """Makes processes give back unused memory and measures the base anew; it may be less than before.

        Nothing may be under way. If nothing has passed in this process yet, forgets what another one learned.
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
        """Returns what was learned, as plain values, for a checkpoint."""
        return {"estimate": self.estimate.state(), **self._figures()}

    def entry(self) -> dict[str, Any]:
        """Returns what was adopted since the last entry, as plain values, for the journal.

        Leaves out unchanged fits: the journal would grow with the square of their number.
        """
        return {"changes": self.estimate.changes(), **self._figures()}

    def _figures(self) -> dict[str, Any]:
        return {
            "reserved": self.reserved,
            "base": list(self.base),
            "more": self._more,
            "passed": self._passed,
            "grown": self._grown,
            "smallest": list(self._smallest),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state` or `entry` returned; entries in the order in which they were written.

        Ignores values of another number of stages.
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
        self._smallest = list(map(min, self._smallest, state["smallest"]))

    def check(self, task: Task) -> None:
        """Raises ValueError (see `refusal`) for a task that fits alone in no process.

        Goes by samples, the least reserve, and the smallest base that any process of the run had when it was
        loaded. A task without samples is refused if its weights and gradients leave no memory to take any.
        """
        bounds = self._by_samples(task)
        if math.inf in bounds:
            parts = zip(self._smallest, self.tasks.begun(task.name), strict=True)
            fits = all(base + RESERVED + begun < self.limit for base, begun in parts)
        else:
            taken = [base + self._least for base in self._smallest]
            fits = max(self._together(task, bounds, taken)) <= self.limit
        if not fits:
            raise ValueError(self.refusal(task, for_good=True))

    def fits(self, task: Task) -> bool:
        """Whether a task fits alone, with today's base and reserve."""
        taken = [base + self.reserved for base in self.base]
        return max(self._together(task, self._bounds(task), taken)) <= self.limit

    def fits_barely(self, task: Task) -> bool:
        """Whether a task fits if it is alone and stays alone.

        The base may then grow into the least reserve, and samples count where measurements only widened the
        margin.
        """
        return self._barely(task) <= self.limit

    def no_room(self, tasks: Sequence[Task]) -> str:
        """Returns why no task can begin in this process though `check` passes them, and what would help.

        None of `tasks` may fit barely.
        """
        if not self.fresh:
            return (
                "there is no room in this process, which takes more than when it began; train what is left "
                "in a new one"
            )
        missing = min(self._barely(task) for task in tasks) - self.limit
        would = "less" if missing == math.inf else f"{in_units(missing)} less"
        limit = (
            "that is higher" if missing == math.inf else f"of {math.ceil((self.limit + missing) / MIB)} MiB"
        )
        return (
            f"there is no room in this process, which takes {in_units(max(self.base))} before it trains; "
            f"train what is left in a new one that takes {would}, or with a scheduler.memory_limit {limit}"
        )

    def _barely(self, task: Task) -> float:
        """Returns the bytes in use at the fullest stage while a task is alone and stays alone."""
        lengths = {task.name: self.tasks.largest(task)}
        likely = self.estimate.predict(lengths, [task.name])
        known = zip(self._bounds(task), self._by_samples(task), likely, strict=True)
        bounds = [max(min(bound, sampled), size) for bound, sampled, size in known]
        now = [base + self._more + self._pieces for base in self.base]
        loaded = [base + self._least for base in self._loaded]
        return max(self._together(task, bounds, list(map(max, now, loaded))))

    @property
    def _least(self) -> int:
        return _LEAST_RESERVED + self._pieces

    def _together(self, task: Task, bounds: Sequence[float], taken: Sequence[int]) -> list[float]:
        """Returns the bytes in use at each stage with a task."""
        parts = zip(bounds, self.tasks.admitted(task.name), taken, strict=True)
        return [bound + states + used for bound, states, used in parts]

    def _bounds(self, task: Task) -> Sequence[float]:
        return self.estimate.activations({task.name: self.tasks.largest(task)}, [task.name])

    def _by_samples(self, task: Task) -> Sequence[float]:
        return self.estimate.by_samples({task.name: self.tasks.largest(task)}, [task.name])

    def refusal(self, task: Task, *, for_good: bool = False) -> str:
        """Returns why a task does not fit and what would: the largest batch, or a limit.

        `for_good` goes by what `check` goes by, otherwise by what is known today.
        """
        bounds_of = self.estimate.by_samples if for_good else self.estimate.activations
        at_base = self._smallest if for_good else self.base
        bounds = self._by_samples(task) if for_good else self._bounds(task)
        reserved = self._least if for_good else self.reserved
        if for_good and math.inf in bounds:
            reserved = RESERVED
        states, lengths = self.tasks.admitted(task.name), self.tasks.largest(task)
        taken = (
            f"of scheduler.memory_limit {in_units(self.limit)}, {in_units(max(at_base))} are taken by the "
            f"base model and libraries, and {in_units(reserved)} kept in reserve"
        )
        if math.inf in bounds:
            return (
                f"has {in_units(max(states))} of states; {taken}: too little is left to measure what a "
                f"micro-batch of it needs{'' if for_good else ' beside the adapters that are there now'}"
            )
        needs = [size + state for size, state in zip(bounds, states, strict=True)]
        used = [base + reserved for base in at_base]
        would = max(self._together(task, bounds, used))
        fits = self._most_that_fit(task, len(lengths), used, bounds_of)
        what = f"per_device_train_batch_size {fits} or" if fits else "not even one sequence fits;"
        return (
            f"needs {in_units(max(needs))} for its largest micro-batch of {len(lengths)} sequences with "
            f"{sum(lengths)} tokens; {taken}; {what} a limit of {math.ceil(would / MIB)} MiB would do"
        )

    def _most_that_fit(self, task: Task, count: int, taken: Sequence[int], bounds_of: Bounds) -> int:
        """Returns the largest batch below `count` with which all micro-batches of a task fit, or 0."""

        def fits(batch: int) -> bool:
            lengths = largest_lengths(with_batches_of(task, batch), partial(self.tasks.size, task.name))
            bounds = bounds_of({task.name: lengths}, [task.name])
            return max(self._together(task, bounds, taken)) <= self.limit

        return bisect_left(range(1, count), True, key=lambda batch: not fits(batch))


def in_units(size: float) -> str:
    """Returns bytes as ``1.50 GiB``, ``300 MiB``, ``20 KiB`` or ``7 bytes``."""
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    if size >= MIB:
        return f"{size / MIB:.0f} MiB"
    return f"{size / 2**10:.0f} KiB" if size >= 2**10 else f"{size:.0f} bytes"
