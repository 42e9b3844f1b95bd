"""The simulator's input: stages with their times, links between them, streams of micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..pipeline.actions import SCHEDULES, Schedule


def _check(thing: object, least: int, *names: str) -> None:
    """Refuses fields that are not finite numbers of at least `least`."""
    for name in names:
        value = getattr(thing, name)
        if not (math.isfinite(value) and value >= least):
            raise ValueError(f"{name}: expected a number of at least {least}, got {value}")


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds that a stage needs: `forward + forward_row * rows` for the forward of a micro-batch."""

    forward: float  # forward, backward: of any micro-batch
    backward: float
    forward_row: float = 0.0  # forward_row, backward_row: more, for each of its rows
    backward_row: float = 0.0
    # of a stream's optimizer step, which a stage runs just before the next step's first forward
    optimizer: float = 0.0

    def __post_init__(self) -> None:
        _check(self, 0, "forward", "backward", "forward_row", "backward_row", "optimizer")

    def seconds(self, rows: float = 0) -> float:
        """Returns the time of forward and backward together."""
        return self.forward + self.backward + (self.forward_row + self.backward_row) * rows


@dataclass(frozen=True, slots=True)
class SimulatedLink:
    """One direction between two neighbours: a FIFO that is busy while a message enters it.

    A message occupies it for `overhead + row_bytes * rows / bandwidth` and arrives `latency` after that.
    """

    latency: float = 0.0  # seconds
    bandwidth: float = math.inf  # bytes per second; infinite by default
    row_bytes: float = 0.0  # bytes of a row of a micro-batch
    overhead: float = 0.0  # seconds per message, whatever its size

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth: expected a number above 0, got {self.bandwidth}")
        _check(self, 0, "latency", "row_bytes", "overhead")

    def seconds(self, rows: float) -> float:
        """Returns how long a message occupies the link."""
        return self.overhead + self.row_bytes * rows / self.bandwidth


@dataclass(frozen=True, slots=True)
class Stream:
    """An adapter, or a group of adapters that are batched together."""

    steps: int  # optimizer steps until it ends
    micro_batches: int = 1  # N of each step
    rows: tuple[int, ...] = (1,)  # of its micro-batches, taken in turn over all its steps
    start: float = 0.0  # seconds; when it joins

    def __post_init__(self) -> None:
        _check(self, 1, "steps", "micro_batches")
        if not self.rows or min(self.rows) < 1:
            raise ValueError(f"rows: expected numbers of at least 1, got {list(self.rows)}")
        _check(self, 0, "start")

    def rows_of(self, step: int, micro_batch: int) -> int:
        """Returns the rows of one of its micro-batches."""
        return self.rows[(step * self.micro_batches + micro_batch) % len(self.rows)]


@dataclass(frozen=True)
class Workload:
    """A pipeline and what runs through it."""

    stages: Sequence[StageTime]  # times of the D stages
    # `gpipe` and `1f1b` flush after each step of a stream, so several streams take turns
    streams: Sequence[Stream]
    schedule: str | Schedule = "lorapp"  # `lorapp`, `1f1b` or `gpipe`, or lists of actions
    # the links from each stage to the next: one for all, or D - 1
    forward: SimulatedLink | Sequence[SimulatedLink] = SimulatedLink()
    # the links back; `backward[s]` is from stage s + 1 to stage s
    backward: SimulatedLink | Sequence[SimulatedLink] = SimulatedLink()
    # for `lorapp`, the most micro-batches in the pipeline at once; None = any number
    in_flight: int | None = None

    def __post_init__(self) -> None:
        for name in ("stages", "streams"):
            if not getattr(self, name):
                raise ValueError(f"{name}: expected at least one, got none")
        for name in ("forward", "backward"):
            links = getattr(self, name)
            if not isinstance(links, SimulatedLink) and len(links) != len(self.stages) - 1:
                raise ValueError(
                    f"{name}: expected one link, or {len(self.stages) - 1} for {len(self.stages)} stages, "
                    f"got {len(links)}"
                )
        if isinstance(self.schedule, str) and self.schedule not in SCHEDULES:
            raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {self.schedule!r}")

    def links(self, direction: SimulatedLink | Sequence[SimulatedLink]) -> list[SimulatedLink]:
        """Returns one link for each pair of neighbours."""
        return (
            [direction] * (len(self.stages) - 1) if isinstance(direction, SimulatedLink) else list(direction)
        )
