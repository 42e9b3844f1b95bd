"""Records what each role of a stage did, and what disk and optimizer did beside them, and when."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

ROLES = ("receive", "compute", "send")
BESIDE = ("read", "update", "write")
"""What goes on beside the roles where a model is out of core."""


class Span(NamedTuple):
    """One piece of work of a role, or of disk and optimizer beside them."""

    role: str  # one of `ROLES` or `BESIDE`
    sort: str  # `forward` (with the loss, on the last stage), `backward`, another message's, or a tensor
    number: int  # the micro-batch's, or -1
    begin: int  # begin, end: nanoseconds of the machine's monotonic clock
    end: int


class Entry(NamedTuple):
    """A micro-batch that entered a pipeline."""

    number: int  # counts all micro-batches of the pipeline
    stream: str  # the stream that it belongs to
    position: int  # its index in its round
    rows: int
    train: bool
    replica: int = 0  # the pipeline that it entered


class Trace:
    """Keeps the latest `limit` spans of one stage, and as many beside them. Threads write to it.

    On a GPU, spans of the compute role cover the launching, not the kernels.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self._spans: deque[Span] = deque(maxlen=limit)
        self._beside: deque[Span] = deque(maxlen=limit)
        self._lock = threading.Lock()

    def add(self, role: str, sort: str, number: int, begin: int) -> None:
        """Records a span that ends now."""
        if self.limit:
            with self._lock:
                self._spans.append(Span(role, sort, number, begin, time.monotonic_ns()))

    def add_beside(self, role: str, what: str, begin: int, end: int) -> None:
        """Records a read, an update or a write."""
        with self._lock:
            self._beside.append(Span(role, what, -1, begin, end))

    @contextmanager
    def span(self, role: str, sort: str, number: int) -> Iterator[None]:
        """Records the time spent inside the context."""
        begin = time.monotonic_ns()
        yield
        self.add(role, sort, number, begin)

    def spans(self) -> list[Span]:
        """Returns the spans in the order of their ends, then those beside them."""
        with self._lock:
            return [*self._spans, *self._beside]

    def by_the_wall(self) -> list[list[object]]:
        """Returns the spans as plain values; times since 1970, which the clocks of several machines share."""
        shift = time.time_ns() - time.monotonic_ns()
        return [[s.role, s.sort, s.number, s.begin + shift, s.end + shift] for s in self.spans()]
