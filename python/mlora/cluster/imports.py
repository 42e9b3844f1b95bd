"""Imports of torch and Transformers, which take seconds: without garbage collection, and ended by Ctrl-C.

A signal handler's exception can come up anywhere. Packages that are interrupted during their import swallow
it or stay half made: numpy 2 then recurses until Python gives up, and Transformers says that its requirements
are missing. A user who interrupts a program that is still starting wants it to end.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def no_collection() -> Iterator[None]:
    """Turns garbage collection off: imports make no garbage, and looking takes an eighth of their time."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def end_imports_at_once() -> None:
    """Makes SIGINT end this process at once during an import; at other times it raises KeyboardInterrupt.
    A process that ignores SIGINT goes on doing so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported; `frame` is where a signal has met the main thread."""
    while frame is not None:
        if "importlib._bootstrap" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    if is_importing(frame):
        os.write(2, b"error: interrupted\n")
        os._exit(128 + number)
    raise KeyboardInterrupt
