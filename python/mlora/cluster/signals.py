"""Signals that ask a run to end, in every phase of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from .imports import is_importing

URGENT = (signal.SIGINT, signal.SIGTERM)
"""Of these two the second one does not wait for the checkpoint."""
OTHERS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""A terminal that closes, and a cluster's scheduler that warns. They may come several times."""


_ONE_SIGNAL = 1.0  # seconds


class Caught(list[int]):
    """The signals that a process has caught, in their order.

    SIGINT and SIGTERM soon after the first of them are still that one: systemd and Slurm send it to all
    processes of a job, and the launcher passes it on once more.
    """

    _first: float | None = None

    def note(self, number: int) -> bool:
        """Adds a signal, and returns whether it is a second SIGINT or SIGTERM."""
        second, now = False, time.monotonic()
        if number in URGENT:
            second = self._first is not None
            if self._first is not None and now - self._first < _ONE_SIGNAL:
                return False
            self._first = now
        self.append(number)
        return second


class Interrupted(Exception):
    """A signal asks the run to end before the work at hand is done."""


class ToldToEnd(SystemExit):
    """A signal ends this process."""


def end_at_once(number: int, frame: FrameType | None) -> None:
    """Handles a signal that comes before a run has anything to save: ends this process."""
    if is_importing(frame):
        os._exit(128 + number)
    raise ToldToEnd(128 + number)


def set_handlers(handler: Any) -> None:
    """Sets the handler of all signals that end a run, except SIGINT and those that this process ignores."""
    for number in (signal.SIGTERM, *OTHERS):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def ending() -> list[int]:
    """Returns the signals that end a run of this process.

    One of `OTHERS` is left alone if it is ignored, as SIGHUP is under nohup, or if the program handles it.
    """
    return [*URGENT, *(one for one in OTHERS if signal.getsignal(one) in (signal.SIG_DFL, end_at_once))]


@contextmanager
def ending_signals() -> Iterator[list[int]]:
    """Yields a list that collects the signals that end a run; outside the main thread, none.

    A second SIGINT or SIGTERM acts as before. More of the others change nothing.
    """
    caught = Caught()
    if threading.current_thread() is not threading.main_thread():  # Python handles no signals there
        yield caught
        return
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in ending()}

    def catch(number: int, frame: FrameType | None) -> None:
        if caught.note(number):
            for other in URGENT:
                signal.signal(other, before[other])
            signal.raise_signal(number)

    for number in before:
        signal.signal(number, catch)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            # more of a scheduler's warnings do not keep a stage from ending in order
            warned = caught and number in OTHERS and handler is end_at_once
            signal.signal(number, signal.SIG_IGN if warned else handler)
