"""Time of single calls inside of a run's iterations, and what share of a step they take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Clock = Callable[[], float]
EACH = ("asked", "next", "next_batch", "worth_measuring", "passed", "ended")
"""Calls of each iteration."""
DECISION = ("decide", "write_summary")
DECISIONS_EVERY = 25
"""Iterations for each decision: as many as there are where 64 tasks of 1600 steps each end one by one."""
MEASURED_EVERY = 256
"""Of this many micro-batches of a mixture one is measured, when the first ones have been."""


@dataclass
class Iteration:
    """One iteration.

    Attributes:
        begin: when it began, in seconds.
        seconds: until the next one began.
        rows: that were trained.
        tasks: that took part.
        measured: whether its memory was.
        calls: seconds of the calls inside, by name.
    """

    begin: float
    seconds: float = 0.0
    rows: int = 0
    tasks: int = 0
    measured: bool = False
    calls: dict[str, float] = field(default_factory=dict)

    @property
    def is_step(self) -> bool:
        """Whether a batch was trained, and nothing decided."""
        return self.tasks > 0 and "decide" not in self.calls


class Stopwatch:
    """Times methods of single objects, by iterations.

    Args:
        clock: of seconds.

    Attributes:
        iterations: those that have begun.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.iterations: list[Iteration] = []
        self._clock = clock
        self._now: Iteration | None = None

    def begin(self) -> None:
        """End the present iteration, and begin the next one."""
        self.end()
        self._now = Iteration(self._clock())
        self.iterations.append(self._now)

    def end(self) -> None:
        """End the present iteration; nothing outside of one is counted."""
        if self._now is not None:
            self._now.seconds = self._clock() - self._now.begin
        self._now = None

    def time(self, owner: Any, method: str) -> None:
        """Let an object's method be timed from now on; its class stays as it is.

        Args:
            owner: of the method.
            method: its name, under which its seconds are counted.
        """
        run = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = self._clock()
            try:
                return run(*arguments, **named)
            finally:
                self._count(method, self._clock() - begin)

        setattr(owner, method, timed)

    def _count(self, name: str, seconds: float) -> None:
        if self._now is not None:
            self._now.calls[name] = self._now.calls.get(name, 0.0) + seconds


def overhead(iterations: Sequence[Iteration], measuring: float) -> dict[str, Any]:
    """What the scheduler takes of a step.

    Calls of each iteration count by their means. Those of the step after a decision take longer, since what
    was remembered is asked for anew; what they take more counts as often as there are decisions. `show`
    publishes by the clock, every few seconds. Decisions count by their median.

    Args:
        iterations: of a run.
        measuring: what measuring adds to a step, as a share of it.

    Returns:
        `step_seconds`, the median; `seconds` of each call, `decision_seconds` and its `decision_parts`; as
        shares of a step `shares` of each piece, and their sum `share`.

    Raises:
        ValueError: there is no step, or no decision.
    """
    after = {id(one) for before, one in pairwise(iterations) if "decide" in before.calls}
    steps = [one for one in iterations if one.is_step]
    steps = [one for one in steps if not one.measured] or steps  # a mixture may still be learned
    decisions = [one for one in iterations if "decide" in one.calls]
    if not steps or not decisions:
        raise ValueError(f"iterations: expected steps and decisions, got {len(steps)} and {len(decisions)}")
    step = statistics.median(one.seconds for one in steps)
    first = [one for one in steps if id(one) in after]
    others = [one for one in steps if id(one) not in after] or steps
    seconds = {name: mean_of(others, name) for name in EACH}
    more = {name: max(0.0, mean_of(first, name) - seconds[name]) for name in EACH} if first else {}
    seconds = {name: value + more.get(name, 0.0) / DECISIONS_EVERY for name, value in seconds.items()}
    seconds["show"] = mean_of(steps, "show")
    decision = statistics.median(sum(one.calls.get(name, 0.0) for name in DECISION) for one in decisions)
    shares = {name: value / step for name, value in seconds.items()}
    shares["decisions"] = decision / DECISIONS_EVERY / step
    shares["measuring"] = measuring / MEASURED_EVERY
    return {
        "steps": len(steps),
        "step_seconds": step,
        "tasks_of_a_step": statistics.median(one.tasks for one in steps),
        "rows_of_a_step": statistics.median(one.rows for one in steps),
        "seconds": seconds,
        "worst_seconds": {name: max(one.calls.get(name, 0.0) for one in steps) for name in (*EACH, "show")},
        "decisions": len(decisions),
        "decision_seconds": decision,
        "decision_parts": {name: median_of(decisions, name) for name in (*DECISION, "write_entry")},
        "iterations_for_each_decision": DECISIONS_EVERY,
        "measuring_of_a_measured_step": measuring,
        "shares": shares,
        "share": sum(shares.values()),
    }


def mean_of(iterations: Sequence[Iteration], name: str) -> float:
    """Mean seconds of a call; 0 where an iteration had none."""
    return statistics.fmean(one.calls.get(name, 0.0) for one in iterations)


def median_of(iterations: Sequence[Iteration], name: str) -> float:
    """Median seconds of a call; 0 where an iteration had none."""
    return statistics.median(one.calls.get(name, 0.0) for one in iterations)


def ratios(turns: Mapping[str, Sequence[Sequence[Iteration]]], over: str, under: str) -> dict[str, float]:
    """Seconds of one run's steps over another's, step by step of the same turns, which train the same rows.

    Args:
        turns: of each run.
        over: name of the one.
        under: of the other.

    Returns:
        The `median` of the ratios, and their interquartile range as `spread`.

    Raises:
        ValueError: two steps are not of the same rows.
    """
    found = []
    for one, other in zip(turns[over], turns[under], strict=True):
        mine, theirs = ([each for each in turn if each.is_step] for turn in (one, other))
        for a, b in zip(mine, theirs, strict=False):
            if a.rows != b.rows:
                raise ValueError(
                    f"{over}, {under}: expected steps of the same rows, got {a.rows} and {b.rows}"
                )
            found.append(a.seconds / b.seconds)
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    return {"median": middle, "spread": high - low, "steps": len(found)}
