"""Time of functions that take turns, on a CPU and on a GPU.

On a GPU each call is timed by events. Before it, a buffer larger than the L2 cache is cleared four times:
nothing that the call needs is left in the cache, and the host is ahead by some tenths of a millisecond, as it
is inside a model. What the host needs to enqueue the call is a figure of its own; where it is longer than the
device's, the layer is bound by its launches.

On a CPU each function is called twice at its turn, and the second call counts: in training a layer's code has
just run for the layer before.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Run = Callable[[], object]
FLUSH_BYTES, FLUSHES = 512 * 2**20, 4


@dataclass
class Timing:
    """Medians of one function, in seconds.

    Attributes:
        seconds: of a call: wall time on a CPU, between two events on a GPU.
        spread: interquartile range / median of these; differences below it are noise; None of one turn.
        first: on a CPU, of the first call of a turn, with caches that another function has filled.
        processors: on a CPU, processor seconds per wall second.
        host: on a GPU, until everything was enqueued.
    """

    seconds: float
    spread: float | None
    first: float | None = None
    processors: float | None = None
    host: float | None = None


class Clock(Protocol):
    """Times calls on one kind of device."""

    def turn(self, run: Run) -> tuple[float, ...]: ...

    def timing(self, turns: list[tuple[float, ...]]) -> Timing: ...


class HostClock:
    """Wall and processor time; two calls in a row."""

    def turn(self, run: Run) -> tuple[float, ...]:
        first, second = timed(run), timed(run)
        return first["seconds"], second["seconds"], second["processors"]

    def timing(self, turns: list[tuple[float, ...]]) -> Timing:
        first, wall, processors = zip(*turns, strict=True)
        busy = sum(s * p for s, p in zip(wall, processors, strict=True)) / sum(wall)
        return Timing(statistics.median(wall), spread(wall), statistics.median(first), busy)


class DeviceClock:
    """CUDA events around a call that finds the L2 cache flushed."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def turn(self, run: Run) -> tuple[float, ...]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(FLUSHES):
            self._buffer.zero_()
        begin.record()
        host = time.perf_counter()
        results = run()
        host = time.perf_counter() - host
        end.record()
        end.synchronize()
        del results
        return begin.elapsed_time(end) * 1e-3, host

    def timing(self, turns: list[tuple[float, ...]]) -> Timing:
        seconds, host = zip(*turns, strict=True)
        return Timing(statistics.median(seconds), spread(seconds), host=statistics.median(host))


def clock_for(device: torch.device | str) -> Clock:
    """The clock of a device."""
    place = torch.device(device)
    return DeviceClock(place) if place.type == "cuda" else HostClock()


def take_turns(
    cases: Mapping[str, Run],
    refresh: Callable[[], object],
    rounds: int,
    warm_up: int = 2,
    device: torch.device | str = "cpu",
) -> dict[str, Timing]:
    """Time every case once a round, so that a disturbance meets all of them; the order turns.

    Args:
        cases: functions by name; what they return is freed after the clock has stopped.
        refresh: draws new data, before every round.
        rounds: timed turns of each.
        warm_up: rounds before.
        device: what they run on.
    """
    clock = clock_for(device)
    turns: dict[str, list[tuple[float, ...]]] = {name: [] for name in cases}
    names = list(cases)
    for turn in range(warm_up + rounds):
        refresh()
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times = clock.turn(cases[name])
            if turn >= warm_up:
                turns[name].append(times)
    return {name: clock.timing(times) for name, times in turns.items()}


Turn = dict[str, dict[str, Any]]
"""What each contender took in one turn: wall `seconds`, `processors`, and what it told itself."""


def timed(run: Callable[[], object]) -> dict[str, Any]:
    """Returns wall seconds of a call, how many processors were busy, and the numbers that it returned."""
    wall, processor = time.perf_counter(), time.process_time()
    told = run()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return {"seconds": wall, "processors": processor / wall, **(told if isinstance(told, dict) else {})}


def in_order(names: Iterable[str], turn: int) -> list[str]:
    """Returns who runs after whom in a turn: every second turn is in reverse order."""
    forwards = list(names)
    return forwards if turn % 2 == 0 else forwards[::-1]


def alternate(cases: Mapping[str, Callable[[], object]], turns: int, warm_up: int = 1) -> list[Turn]:
    """Times each case once a turn, after turns that do not count: only ratios within a turn are compared."""
    found = []
    for turn in range(warm_up + turns):
        taken = {name: timed(cases[name]) for name in in_order(cases, turn)}
        if turn >= warm_up:
            found.append({name: taken[name] for name in cases})
    return found


def ratio(turns: Iterable[Turn], upper: str, lower: str, key: str = "seconds") -> float:
    """Returns the median over turns of the ratio of two contenders' numbers."""
    return statistics.median(turn[upper][key] / turn[lower][key] for turn in turns)


def medians(turns: Sequence[Turn]) -> dict[str, dict[str, Any]]:
    """Returns each contender's medians, and the interquartile range over the median of its seconds."""
    return {
        name: {
            key: statistics.median(turn[name][key] for turn in turns)
            for key, value in turns[0][name].items()
            if isinstance(value, float)
        }
        | {"spread": spread([turn[name]["seconds"] for turn in turns])}
        for name in turns[0]
    }


def cores() -> int:
    """Returns how many processors this process may use."""
    return len(os.sched_getaffinity(0))


def spread(seconds: Sequence[float]) -> float | None:
    """Interquartile range / median; a single value has none."""
    if len(seconds) < 2:
        return None
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle


def back_to_back(run: Run, device: torch.device | str, calls: int = 10) -> float:
    """Wall seconds per call of calls that follow each other, as the layers of a model do; nothing flushed."""
    place = torch.device(device)
    run()
    _wait(place)
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    _wait(place)
    return (time.perf_counter() - begin) / calls


def median_seconds(run: Run, place: torch.device, calls: int = 5) -> float:
    """Median wall seconds of calls after two to warm up, each until the device is done."""
    seconds = []
    for _ in range(2 + calls):
        _wait(place)
        begin = time.perf_counter()
        run()
        _wait(place)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[2:])


def _wait(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
