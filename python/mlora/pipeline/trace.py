"""What a stage's roles did when."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

ROLES = ("receive", "compute", "send")


class Span(NamedTuple):
    """Something that a role did.

    Attributes:
        role: `receive`, `compute` or `send`.
        sort: `forward` (with the loss, on the last stage), `backward`, or another message's.
        number: of the micro-batch, or -1.
        begin: nanoseconds of the machine's monotonic clock.
        end: the same.
    """

    role: str
    sort: str
    number: int
    begin: int
    end: int


class Entry(NamedTuple):
    """A micro-batch that entered a pipeline.

    Attributes:
        number: it counts all micro-batches of the pipeline.
        stream: whose it is.
        position: in its round.
        rows: how many it has.
        train: whether it has a backward.
        replica: which pipeline it entered.
    """

    number: int
    stream: str
    position: int
    rows: int
    train: bool
    replica: int = 0


class Trace:
    """Collects spans of one stage, the latest ones; its roles write from their own threads.

    On a GPU the compute role's spans are those of launching, not of the kernels.

    Args:
        limit: how many are kept; 0 = none.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self._spans: deque[Span] = deque(maxlen=limit)
        self._lock = threading.Lock()

    def add(self, role: str, sort: str, number: int, begin: int) -> None:
        """Note what ends now."""
        if self.limit:
            with self._lock:
                self._spans.append(Span(role, sort, number, begin, time.monotonic_ns()))

    @contextmanager
    def span(self, role: str, sort: str, number: int) -> Iterator[None]:
        """Note what happens inside the context."""
        begin = time.monotonic_ns()
        yield
        self.add(role, sort, number, begin)

    def spans(self) -> list[Span]:
        """What was noted, in the order of the ends."""
        with self._lock:
            return list(self._spans)

    def by_the_wall(self) -> list[list[object]]:
        """The spans as plain values; times since 1970, which the clocks of several machines share."""
        shift = time.time_ns() - time.monotonic_ns()
        return [[s.role, s.sort, s.number, s.begin + shift, s.end + shift] for s in self.spans()]
