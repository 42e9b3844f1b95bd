"""Contenders that take turns: a disk's speed drifts within minutes, so only ratios within a turn count."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shared.timing import spread

QUIET = 0.05
"""A result is not to be trusted if other processes took more of the machine than this."""

Turn = dict[str, dict[str, float]]
"""What each contender took in one turn: wall `seconds`, and `processors`, processor seconds per second."""


def timed(run: Callable[[], object]) -> dict[str, float]:
    """Returns wall seconds of a call, and how many processors this process kept busy meanwhile."""
    wall, processor = time.perf_counter(), time.process_time()
    run()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return {"seconds": wall, "processors": processor / wall}


def in_order(names: Iterable[str], turn: int) -> list[str]:
    """Returns who runs after whom in a turn: every second turn is in reverse order."""
    forwards = list(names)
    return forwards if turn % 2 == 0 else forwards[::-1]


def take_turns(cases: Mapping[str, Callable[[], object]], turns: int, warm_up: int = 1) -> list[Turn]:
    """Times each case once a turn, after turns that do not count."""
    found = []
    for turn in range(warm_up + turns):
        taken = {name: timed(cases[name]) for name in in_order(cases, turn)}
        if turn >= warm_up:
            found.append({name: taken[name] for name in cases})
    return found


def ratios(turns: Iterable[Turn], upper: str, lower: str) -> list[float]:
    """Returns the ratio of two contenders' seconds in each turn."""
    return [turn[upper]["seconds"] / turn[lower]["seconds"] for turn in turns]


def medians(turns: list[Turn]) -> dict[str, dict[str, Any]]:
    """Returns each contender's medians, and the interquartile range over the median of its seconds."""
    found = {}
    for name in turns[0]:
        seconds = [turn[name]["seconds"] for turn in turns]
        busy = [turn[name]["processors"] for turn in turns]
        found[name] = {
            "seconds": statistics.median(seconds),
            "spread": spread(seconds),
            "processors": statistics.median(busy),
        }
    return found


def cores() -> int:
    """Returns how many processors this process may use."""
    return len(os.sched_getaffinity(0))
