"""A timeline in columns: what ran where and when, simulated or measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

OPTIMIZER, EVALUATION = "S", "E"
"""Kinds of events beside `ActionType`'s: an optimizer step and, in traces, a forward without a backward."""

COLUMNS = np.dtype(
    [
        ("stage", np.int32),
        ("kind", "U1"),
        ("stream", np.int32),
        ("step", np.int32),
        ("micro_batch", np.int32),
        ("begin", np.float64),
        ("end", np.float64),
        ("rows", np.int64),
    ]
)


class Event(NamedTuple):
    """A stage at work."""

    stage: int  # from 0
    kind: str  # `F`, `B`, `S` for an optimizer step, or `E` for a forward of an evaluation
    stream: int  # index of the adapter or group
    step: int  # the stream's optimizer step, from 0
    micro_batch: int  # index within the step
    begin: float  # begin, end: seconds
    end: float
    rows: int = 1  # of the micro-batch


@dataclass(frozen=True, eq=False)
class Timeline:
    """The work of all stages."""

    stages: int
    events: np.ndarray  # rows of `COLUMNS`, sorted by stage and time

    @classmethod
    def of(cls, events: Iterable[Event]) -> Timeline:
        """Puts events (at least one), in any order, into columns."""
        columns = _sorted(np.array([tuple(event) for event in events], dtype=COLUMNS))
        return cls(int(columns["stage"].max()) + 1, columns)

    def of_stage(self, stage: int) -> list[Event]:
        """Returns a stage's events in the order of time."""
        return as_events(self.events[self.events["stage"] == stage])


def as_events(columns: np.ndarray) -> list[Event]:
    """Returns rows of `COLUMNS` as events."""
    return [Event(*row) for row in columns.tolist()]


def _sorted(columns: np.ndarray) -> np.ndarray:
    return columns[np.lexsort((columns["end"], columns["begin"], columns["stage"]))]


def stack(parts: Iterable[dict[str, Any]]) -> np.ndarray:
    """Returns one table, sorted by stage and time, of parts whose columns broadcast against each other."""
    tables = []
    for part in parts:
        arrays = np.broadcast_arrays(*(part[name] for name in COLUMNS.names or ()))
        table = np.empty(arrays[0].size, COLUMNS)
        for name, array in zip(COLUMNS.names or (), arrays, strict=True):
            table[name] = array.ravel()
        tables.append(table)
    return _sorted(np.concatenate(tables))
