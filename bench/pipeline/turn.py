"""What one turn of a contender is asked for, and what each process tells of it; plain values as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from mlora.pipeline.trace import Span


@dataclass(frozen=True)
class Case:
    """A contender, and what it runs in a turn.

    Attributes:
        name: in results.
        way: `ours`, `torch`, `fsdp`, `tensor` or `by hand`.
        schedule: of a pipeline.
        adapters: L; each makes as many steps.
        micro_batches: N of an optimizer step.
        steps: of each adapter in a turn.
        tasks: whether an adapter makes all its steps before the next one begins; else they take turns.
        at_once: for `lorapp`, adapters that are in the pipeline at once; None = all.
        joint: for `torch`, whether the adapters' micro-batches are one flush.
        keep: for `fsdp`, whether weights that were gathered for forward stay for backward.
        delay: each message is held back by this share of the shortest forward of a stage.
    """

    name: str
    way: str
    schedule: str = ""
    adapters: int = 4
    micro_batches: int = 1
    steps: int = 1
    tasks: bool = False
    at_once: int | None = None
    joint: bool = False
    keep: bool = False
    delay: float = 0.0


class Item(NamedTuple):
    """A micro-batch; its number counts from 1 in the order of entering."""

    adapter: int
    step: int
    micro_batch: int


@dataclass
class Turn:
    """What one process tells of a turn.

    Attributes:
        items: what entered, as the first stage knows.
        spans: what it did, optimizer steps as `optimizer`; none where the contender is no pipeline.
        losses: by item, where the loss is computed.
        ended: monotonic seconds at which each adapter ended, as the first process knows.
        sent: bytes to neighbours that the contender counted.
        delay: seconds by which messages were held back.
    """

    items: list[Item] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    losses: list[tuple[Item, float]] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    sent: int = 0
    delay: float = 0.0


def rounds(case: Case, steps: int) -> Iterator[tuple[int, int]]:
    """Adapter and step of each optimizer step, one after the other.

    Args:
        case: what to run.
        steps: of each adapter.
    """
    if case.tasks:
        yield from ((adapter, step) for adapter in range(case.adapters) for step in range(steps))
    else:
        yield from ((adapter, step) for step in range(steps) for adapter in range(case.adapters))
