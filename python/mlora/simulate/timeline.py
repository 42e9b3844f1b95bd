"""What ran where and when, simulated or measured, in columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..pipeline.actions import Action, ActionType, Schedule

OPTIMIZER, EVALUATION = "S", "E"
"""The kinds of a stage's optimizer step and of a forward without a backward, in traces; forwards and
backwards have those of `ActionType`."""

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
    """A stage at work, or a message on a link.

    Attributes:
        stage: from 0; of a message, the stage that sends it.
        kind: F, B, S for an optimizer step, or E for a forward of an evaluation.
        stream: the adapter or group, by its index.
        step: its optimizer step, from 0.
        micro_batch: index within the step.
        begin, end: seconds.
        rows: of the micro-batch.
    """

    stage: int
    kind: str
    stream: int
    step: int
    micro_batch: int
    begin: float
    end: float
    rows: int = 1


@dataclass(frozen=True, eq=False)
class Timeline:
    """The work of all stages.

    Attributes:
        stages: D.
        events: of the stages, rows of `COLUMNS`, sorted by stage and time.
        messages: on the links, sorted likewise.
    """

    stages: int
    events: np.ndarray
    messages: np.ndarray

    @classmethod
    def of(cls, events: Iterable[Event], messages: Iterable[Event] = ()) -> Timeline:
        """Put events into columns, for example those of a trace.

        Args:
            events: of stages, in any order; at least one.
            messages: on links.
        """
        columns = _sorted(np.array([tuple(event) for event in events], dtype=COLUMNS))
        sent = _sorted(np.array([tuple(event) for event in messages], dtype=COLUMNS))
        return cls(int(columns["stage"].max()) + 1, columns, sent)

    def of_stage(self, stage: int) -> list[Event]:
        """The events of a stage in the order of time."""
        return as_events(self.events[self.events["stage"] == stage])


def as_events(columns: np.ndarray) -> list[Event]:
    """Rows of `COLUMNS` as events."""
    return [Event(*row) for row in columns.tolist()]


def _sorted(columns: np.ndarray) -> np.ndarray:
    return columns[np.lexsort((columns["end"], columns["begin"], columns["stage"]))]


def stack(parts: Iterable[dict[str, Any]]) -> np.ndarray:
    """One table of columns that broadcast against each other, sorted by stage and time.

    Args:
        parts: for each, a value or an array by the name of the column.
    """
    tables = []
    for part in parts:
        arrays = np.broadcast_arrays(*(part[name] for name in COLUMNS.names or ()))
        table = np.empty(arrays[0].size, COLUMNS)
        for name, array in zip(COLUMNS.names or (), arrays, strict=True):
            table[name] = array.ravel()
        tables.append(table)
    return _sorted(np.concatenate(tables))


def action_lists(timeline: Timeline) -> Schedule:
    """The order of a timeline's work as lists of actions: a whole `lorapp` run as a fixed schedule.

    All micro-batches of all streams and steps are numbered as they enter stage 0, and count as one round, so
    that `check_schedule` accepts the lists. They hold for these streams only; with other times than the
    timeline's they still run, and wait longer.

    Args:
        timeline: a run from its begin to its end.

    Returns:
        D lists of 2M actions.
    """
    numbers: dict[tuple[int, int, int], int] = {}
    lists: list[list[Action]] = [[] for _ in range(timeline.stages)]
    for event in as_events(timeline.events[np.isin(timeline.events["kind"], list(ActionType))]):
        key = (event.stream, event.step, event.micro_batch)
        number = numbers.setdefault(key, len(numbers))
        lists[event.stage].append(Action(event.stage, ActionType(event.kind), number))
    return lists
