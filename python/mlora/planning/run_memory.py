"""The memory of a run: what its limit leaves for tasks, and what they need of it.

On a CPU the limit is on what a process has resident, on a GPU on what its allocator holds. What the base
model and the libraries take is measured once the model is there; what tasks need is predicted by samples
before the first step (dry runs on a CPU), and then by what micro-batches are measured to need.

Whether a task is refused for good depends on what no other process would change: the smallest base that a
process of the run has had as it was loaded, and samples. What a process has taken beyond that only makes a
task wait.
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
_LEAST_RESERVED = 32 * MIB  # once it has, and the base is known
_WARM = 8  # micro-batches
_TOLD = 8 * MIB  # growth of what is kept that is worth a new decision

Bounds = Callable[[Mapping[str, Sequence[int]], Sequence[str]], Sequence[float]]
"""Bounds a micro-batch, as `MemoryEstimate.activations`."""


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
        earlier: bytes of `base` at the first place that runs have left there which this process made before.

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
        self.estimate.stale |= self._reserve()

    def _reserve(self) -> bool:
        """Reserve what is still to come, and say whether that is another amount than before."""
        warm = self._passed >= _WARM
        still = 0 if warm else RESERVED - self._grown  # what has come of it is part of the base
        reserved = max(self._more, still, _LEAST_RESERVED) + self._pieces
        changed, self.reserved = reserved != self.reserved, reserved
        return changed

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
            "smallest": list(self._smallest),
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
        self._smallest = list(map(min, self._smallest, state["smallest"]))

    def check(self, task: Task) -> None:
        """Refuse a task that fits alone in no process: beside the smallest base that one of the run's has had
        as it was loaded, by samples and with the least reserve. A task of which there are no samples for now
        is refused where none can be taken.

        Args:
            task: that `know` was told of.

        Raises:
            ValueError: it does not; see `refusal`.
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
        """Say whether a task fits alone, with today's base and reserve.

        Args:
            task: that `know` was told of.
        """
        taken = [base + self.reserved for base in self.base]
        return max(self._together(task, self._bounds(task), taken)) <= self.limit

    def fits_barely(self, task: Task) -> bool:
        """Say whether a task fits where it is alone and stays alone: growth of the base takes from the least
        reserve, and samples count where measurements have only widened the margin.

        Args:
            task: that `know` was told of.
        """
        return self._barely(task) <= self.limit

    def no_room(self, tasks: Sequence[Task]) -> str:
        """Say why none of some tasks begins in this process though `check` lets them pass, and what would do.

        Args:
            tasks: that `know` was told of; none of them fits barely.
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
        """What is in use at the fullest place while a task is there alone, and stays alone."""
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
        """What is in use at each place with a task."""
        parts = zip(bounds, self.tasks.admitted(task.name), taken, strict=True)
        return [bound + states + used for bound, states, used in parts]

    def _bounds(self, task: Task) -> Sequence[float]:
        return self.estimate.activations({task.name: self.tasks.largest(task)}, [task.name])

    def _by_samples(self, task: Task) -> Sequence[float]:
        return self.estimate.by_samples({task.name: self.tasks.largest(task)}, [task.name])

    def refusal(self, task: Task, *, for_good: bool = False) -> str:
        """Say why a task does not fit, and what would: the largest batch, or a limit.

        Args:
            task: that `know` was told of.
            for_good: by what `check` goes by, not by what is known today.
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
        """The largest batch below `count` with which all micro-batches of a task would fit, or 0."""

        def fits(batch: int) -> bool:
            lengths = largest_lengths(with_batches_of(task, batch), partial(self.tasks.size, task.name))
            bounds = bounds_of({task.name: lengths}, [task.name])
            return max(self._together(task, bounds, taken)) <= self.limit

        return bisect_left(range(1, count), True, key=lambda batch: not fits(batch))


def in_units(size: float) -> str:
    """Return bytes as ``1.50 GiB``, ``300 MiB``, ``20 KiB`` or ``7 bytes``."""
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    if size >= MIB:
        return f"{size / MIB:.0f} MiB"
    return f"{size / 2**10:.0f} KiB" if size >= 2**10 else f"{size:.0f} bytes"
