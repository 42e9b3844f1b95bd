"""The room: what a limit on memory leaves for adapters, and whether they fit.

The limit is on a process's resident memory on a CPU, and on the allocator's memory on a GPU. The base model
and the libraries are measured once the model is loaded. Adapters' needs are predicted from samples before
the first step (dry runs on a CPU), and then from measured micro-batches.

An adapter is refused for good only by facts that no other process would change: samples, and the smallest
base that any process of the run had when it was loaded. What a process has taken beyond that only makes an
adapter wait.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlora.errors import MemoryLimitError

if TYPE_CHECKING:
    from mlora.memory.adapter_memory import AdapterMemory

MIB = 2**20
RESERVED = 96 * MIB  # what the libraries and the interpreter still take when training begins
_LEAST_RESERVED = 32 * MIB  # the same after training has begun and the base is known
_WARM = 8  # micro-batches after which training has begun
_TOLD = 8 * MIB  # growth of the base that is worth a new decision


@dataclass(frozen=True)
class Room:
    """The memory that tasks may use together.

    Args:
        free: bytes at each stage for states and activations; None = no limit.
        held: micro-batches whose activations each stage holds at once while all slots are in use.
    """

    free: tuple[int, ...] | None = None
    held: tuple[int, ...] = (1,)

    def budget(self, states: Sequence[int], slots: int) -> tuple[float, ...]:
        """Returns the bytes that one micro-batch may use at each stage, if there is a limit.

        `states` are the bytes of all admitted tasks' states at each stage. If they alone are too much, the
        result is negative.
        """
        assert self.free is not None
        return tuple(
            (free - used) / min(held, slots)
            for free, used, held in zip(self.free, states, self.held, strict=True)
        )


def within(sizes: Sequence[float], budget: Sequence[float]) -> bool:
    """Whether sizes are at most a budget at each stage."""
    return all(size <= most for size, most in zip(sizes, budget, strict=True))


def sum_of(states: Sequence[Sequence[int]], places: int) -> tuple[int, ...]:
    """Adds sizes up, stage by stage."""
    return tuple(sum(state[place] for state in states) for place in range(places))


class MemoryLimit:
    """What adapters may use of the memory under a limit, and whether they fit.

    Args:
        adapters: knows what they need.
        limit: bytes that each stage's process may use.
        base: bytes of each stage's process before any adapter, but after a small micro-batch, for which
            libraries take what they keep for good.
        peak: the most bytes that a process has had until then.
        pieces: bytes that an allocator may hold in pieces too small to be of use; always kept free.
        look: makes each stage give back unused memory and returns its bytes in use; None = nothing runs.
        earlier: the bytes of `base` on the first stage that this process's earlier runs left there.
        held: batches whose activations each stage holds at once at most.
        name: what messages call the limit.

    Attributes:
        base: bytes at each stage without any adapter.
        fresh: whether no micro-batch has passed in this process.
        reserved: bytes kept free at each stage for needs that nobody foresees.
    """

    def __init__(
        self,
        adapters: AdapterMemory,
        limit: int,
        base: Sequence[int],
        peak: int,
        *,
        pieces: int = 0,
        look: Callable[[], Sequence[int]] | None = None,
        earlier: int = 0,
        held: Sequence[int] = (1,),
        name: str = "memory_limit",
    ) -> None:
        self.adapters, self.base, self.reserved = adapters, list(base), RESERVED + pieces
        self.estimate = adapters.estimate
        self.limit, self._name = limit, name
        self._held = tuple(held)
        self._loaded, self._peak, self._pieces, self._look = list(base), peak, pieces, look
        self._smallest = [max(0, base[0] - earlier), *base[1:]]  # of the run's processes, as loaded
        self._more = self._passed = self._grown = 0
        self.fresh = True

    def room(self) -> Room:
        """Returns what adapters may use."""
        return Room(tuple(self.limit - base - self.reserved for base in self.base), self._held)

    def took(self, names: Sequence[str], foreseen: Sequence[float], peak: int, after: Sequence[int]) -> None:
        """Compares processes' memory with the prediction: what they keep joins the base, peaks are reserved.

        Args:
            names: of the adapters on the engine.
            foreseen: predicted bytes of what was under way, at each stage.
            peak: the most bytes that a stage has had so far.
            after: bytes of each stage once nothing was under way; empty while something is.
        """
        states = self.adapters.at_rest(names)
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

    def look_again(self, names: Sequence[str]) -> None:
        """Makes processes give back unused memory and measures the base anew; it may be less than before.

        `names` are the adapters on the engine. Nothing may be under way. If nothing has passed in this
        process yet, forgets what another one learned.
        """
        if self._look is None:
            return
        states = self.adapters.at_rest(names)
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

    def check(self, name: str) -> None:
        """Raises MemoryLimitError (see `refusal`) for an adapter that fits alone in no process.

        Goes by samples, the least reserve, and the smallest base that any process of the run had when it was
        loaded. Without samples an adapter is refused if its weights and gradients leave no memory for any.
        Where the base leaves nothing, not even a dry run is made: its libraries would pass the limit.
        """
        if fault := nothing_left(self.limit, self._name, self._smallest):
            raise MemoryLimitError(fault)
        bounds = self.estimate.by_samples(*self._alone(name))
        if math.inf in bounds:
            parts = zip(self._smallest, self.adapters.begun(name), strict=True)
            fits = all(base + RESERVED + begun < self.limit for base, begun in parts)
        else:
            fits = self._most(name, bounds, self._smallest, self._least) <= self.limit
        if not fits:
            raise MemoryLimitError(self.refusal(name, for_good=True))

    def fits(self, name: str) -> bool:
        """Whether an adapter fits alone, with today's base and reserve."""
        bounds = self.estimate.activations(*self._alone(name))
        return self._most(name, bounds, self.base, self.reserved) <= self.limit

    def fits_barely(self, name: str) -> bool:
        """Whether an adapter fits if it is alone and stays alone.

        The base may then grow into the least reserve, and samples count where measurements only widened the
        margin.
        """
        return self._barely(name) <= self.limit

    def no_room(self, waiting: Sequence[str]) -> str:
        """Returns why none can begin in this process though `check` passes them, and what would help.

        None of them may fit barely.
        """
        if not self.fresh:
            return "not enough memory in this process, which has grown; go on in a new one"
        missing = min(self._barely(name) for name in waiting) - self.limit
        less, to = "less", ""
        if missing != math.inf:
            less, to = f"{in_units(missing)} less", f" to {math.ceil((self.limit + missing) / MIB)} MiB"
        return (
            f"not enough memory in this process, which uses {in_units(max(self.base))} before it trains; "
            f"go on in one that uses {less}, or raise {self._name}{to}"
        )

    def _barely(self, name: str) -> float:
        """Returns the bytes in use at the fullest stage while an adapter is alone and stays alone."""
        estimate, alone = self.estimate, self._alone(name)
        likely, bounded = estimate.predict(*alone), estimate.activations(*alone)
        known = zip(bounded, estimate.by_samples(*alone), likely, strict=True)
        bounds = [max(min(bound, sampled), size) for bound, sampled, size in known]
        now = [base + self._more + self._pieces for base in self.base]
        loaded = [base + self._least for base in self._loaded]
        return self._most(name, bounds, list(map(max, now, loaded)), 0)

    @property
    def _least(self) -> int:
        return _LEAST_RESERVED + self._pieces

    def _most(self, name: str, bounds: Sequence[float], bases: Sequence[int], reserved: int) -> float:
        """Returns the bytes in use at the fullest stage with an adapter."""
        parts = zip(bounds, self.adapters.admitted(name), bases, strict=True)
        return max(bound + states + (base + reserved) for bound, states, base in parts)

    def _alone(self, name: str, batch_size: int | None = None) -> tuple[dict[str, Sequence[int]], list[str]]:
        """Returns an adapter's largest micro-batch and its mixture, as the estimate is asked about them."""
        return {name: self.adapters.largest(name, batch_size)}, [name]

    def refusal(self, name: str, *, for_good: bool = False) -> str:
        """Returns why an adapter does not fit and what would: the largest batch, or a limit.

        `for_good` goes by what `check` goes by, otherwise by what is known today.
        """
        bounds_of, at_base, reserved = self.estimate.activations, self.base, self.reserved
        if for_good:
            bounds_of, at_base, reserved = self.estimate.by_samples, self._smallest, self._least
        bounds = bounds_of(*self._alone(name))
        if for_good and math.inf in bounds:
            reserved = RESERVED
        states, lengths = self.adapters.admitted(name), self.adapters.largest(name)
        taken = taken_of(self.limit, self._name, at_base, reserved)
        if math.inf in bounds:
            return (
                f"has {in_units(max(states))} of states; {taken}: too little is left to measure what a "
                f"micro-batch of it needs{'' if for_good else ' beside the adapters that are there now'}"
            )
        needs = [size + state for size, state in zip(bounds, states, strict=True)]
        would = math.ceil(self._most(name, bounds, at_base, reserved) / MIB)

        def too_much(batch: int) -> bool:
            found = bounds_of(*self._alone(name, batch))
            return self._most(name, found, at_base, reserved) > self.limit

        fits = bisect_left(range(1, len(lengths)), True, key=too_much)
        lower = "even one sequence is too much;"
        if fits:
            lower = f"lower per_device_train_batch_size to {fits}, or"
        batch = f"{len(lengths)} sequence{'s' * (len(lengths) > 1)} with {sum(lengths)} tokens"
        return (
            f"needs {in_units(max(needs))} for its largest micro-batch of {batch}; {taken}; {lower} "
            f"raise the limit to {would} MiB"
        )

    def taken(self) -> str:
        """Says what the limit is and what of it is taken now, for a message."""
        return taken_of(self.limit, self._name, self.base, self.reserved)


def taken_of(limit: int, name: str, base: Sequence[int], reserved: int) -> str:
    """Says what a limit of this name is and what of it is taken, for a message."""
    return (
        f"of {name} {in_units(limit)}, the base model and libraries take {in_units(max(base))}, and "
        f"{in_units(reserved)} are kept in reserve"
    )


def nothing_left(limit: int, name: str, base: Sequence[int]) -> str | None:
    """Returns what to say if a limit leaves nothing beside processes with the base model alone, else None.

    So it is known before a first micro-batch, which would take more than the limit.
    """
    missing = max(base) + _LEAST_RESERVED - limit
    if missing < 0:
        return None
    taken, more = taken_of(limit, name, base, _LEAST_RESERVED), in_units(max(1, missing))
    return f"nothing is left for adapters: {taken}; raise the limit by more than {more}"


def in_units(size: float) -> str:
    """Returns bytes as ``1.50 GiB``, ``300 MiB``, ``20 KiB`` or ``7 bytes``."""
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    if size >= MIB:
        return f"{size / MIB:.0f} MiB"
    return f"{size / 2**10:.0f} KiB" if size >= 2**10 else f"{size:.0f} bytes"
