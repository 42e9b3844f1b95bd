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
        sort: `forward`, `backward`, `unit` (the last stage's forward, loss and backward), or a message's.
        number: of the micro-batch, or -1.
        stream: whose micro-batch, as its submitter calls it.
        begin: nanoseconds of the machine's monotonic clock.
        end: the same.
    """

    role: str
    sort: str
    number: int
    stream: str
    begin: int
    end: int


class Trace:
    """Collects spans of one stage, the latest ones; its roles write from their own threads.

    Args:
        limit: how many are kept; 0 = none.
    """

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._spans: deque[Span] = deque(maxlen=limit)
        self._lock = threading.Lock()

    def add(self, role: str, sort: str, number: int, stream: str, begin: int) -> None:
        """Note what ends now."""
        if self._limit:
            with self._lock:
                self._spans.append(Span(role, sort, number, stream, begin, time.monotonic_ns()))

    @contextmanager
    def span(self, role: str, sort: str, number: int, stream: str) -> Iterator[None]:
        """Note what happens inside the context."""
        begin = time.monotonic_ns()
        yield
        self.add(role, sort, number, stream, begin)

    def spans(self) -> list[Span]:
        """What was noted, in the order of the ends."""
        with self._lock:
            return list(self._spans)
