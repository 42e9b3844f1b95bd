"""Time of functions that take turns, on a CPU and on a GPU.

On a GPU each call is timed by events. Before it, a buffer larger than the L2 cache is cleared four times:
nothing that the call needs is left in the cache, and the host is ahead by some tenths of a millisecond, as it
is inside a model. What the host needs to enqueue the call is a figure of its own; where it is longer than the
device's, the layer is bound by its launches.

On a CPU each function is called twice at its turn, and the second call counts: in training a layer's code has
just run for the layer before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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
        return (_timed(run)[0], *_timed(run))

    def timing(self, turns: list[tuple[float, ...]]) -> Timing:
        first, wall, processor = zip(*turns, strict=True)
        busy = sum(processor) / sum(wall)
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

    Returns:
        Medians by name.
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


def medians(cases: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 3) -> dict[str, float]:
    """Median seconds of each case, the cases taking turns so that a disturbance meets all of them.

    Args:
        cases: functions by name.
        rounds: timed calls of each.
        warm_up: calls before.

    Returns:
        Seconds by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(warm_up + rounds):
        for name, run in cases.items():
            begin = time.perf_counter()
            run()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


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


def _timed(run: Run) -> tuple[float, float]:
    """Wall and processor seconds of one call, without freeing its results."""
    wall, processor = time.perf_counter(), time.process_time()
    results = run()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    del results
    return wall, processor
