"""The simulator's input: stages with their times, links between them, streams of micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..pipeline.actions import SCHEDULES, Schedule


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds that a stage needs: `forward + forward_row * rows` for the forward of a micro-batch.

    Attributes:
        forward, backward: of any micro-batch.
        forward_row, backward_row: more, for each of its rows.
        optimizer: of a stream's optimizer step, which a stage runs just before the next step's first forward.
    """

    forward: float
    backward: float
    forward_row: float = 0.0
    backward_row: float = 0.0
    optimizer: float = 0.0

    def seconds(self, rows: float = 0) -> float:
        """Returns the time of forward and backward together."""
        return self.forward + self.backward + (self.forward_row + self.backward_row) * rows


@dataclass(frozen=True, slots=True)
class SimulatedLink:
    """One direction between two neighbours: a FIFO that is busy while a message enters it.

    A message occupies it for `overhead + row_bytes * rows / bandwidth` and arrives `latency` after that.

    Attributes:
        latency: seconds.
        bandwidth: bytes per second; infinite by default.
        row_bytes: bytes of a row of a micro-batch.
        overhead: seconds per message, whatever its size.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    row_bytes: float = 0.0
    overhead: float = 0.0

    def seconds(self, rows: float) -> float:
        """Returns how long a message occupies the link."""
        return self.overhead + self.row_bytes * rows / self.bandwidth


@dataclass(frozen=True, slots=True)
class Stream:
    """An adapter, or a group of adapters that are batched together.

    Attributes:
        steps: optimizer steps until it ends.
        micro_batches: N of each step.
        rows: of its micro-batches, taken in turn over all its steps.
        start: seconds; when it joins.
    """

    steps: int
    micro_batches: int = 1
    rows: tuple[int, ...] = (1,)
    start: float = 0.0

    def rows_of(self, step: int, micro_batch: int) -> int:
        """Returns the rows of one of its micro-batches."""
        return self.rows[(step * self.micro_batches + micro_batch) % len(self.rows)]


@dataclass(frozen=True)
class Workload:
    """A pipeline and what runs through it.

    Attributes:
        stages: times of the D stages.
        streams: `gpipe` and `1f1b` flush after each step of a stream, so several streams take turns.
        schedule: `lorapp`, `1f1b` or `gpipe`, or lists of actions.
        forward: the links from each stage to the next: one for all, or D - 1.
        backward: the links back; `backward[s]` is from stage s + 1 to stage s.
        in_flight: for `lorapp`, the most micro-batches in the pipeline at once; None = any number.
    """

    stages: Sequence[StageTime]
    streams: Sequence[Stream]
    schedule: str | Schedule = "lorapp"
    forward: SimulatedLink | Sequence[SimulatedLink] = SimulatedLink()
    backward: SimulatedLink | Sequence[SimulatedLink] = SimulatedLink()
    in_flight: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.schedule, str) and self.schedule not in SCHEDULES:
            raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {self.schedule!r}")

    def links(self, direction: SimulatedLink | Sequence[SimulatedLink]) -> list[SimulatedLink]:
        """Returns one link for each pair of neighbours."""
        return (
            [direction] * (len(self.stages) - 1) if isinstance(direction, SimulatedLink) else list(direction)
        )
