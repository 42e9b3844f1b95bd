"""Importing torch and Transformers, which takes seconds: without collecting garbage, and ended by Ctrl-C.

An exception that a signal handler raises can come up anywhere, and packages that are interrupted while they
are imported swallow it, or stay half made: numpy 2 then recurses until Python gives up, and Transformers says
that its requirements are missing. Who interrupts a program that is still starting wants it to end.
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
    """Inside, Python does not look for garbage: imports make none, looking takes an eighth of their time."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def end_imports_at_once() -> None:
    """From now on SIGINT ends this process at once where it imports something.

    Elsewhere it raises KeyboardInterrupt, as ever. A process that ignores SIGINT goes on doing so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def is_importing(frame: FrameType | None) -> bool:
    """Say whether a module is being imported.

    Args:
        frame: where a signal has met the main thread.
    """
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
