"""One thread at a time: an active route belongs to the thread that entered it."""

from __future__ import annotations

import sys
import threading
from types import FrameType

import torch
from torch import nn

_MODULE_FILE = nn.Module.__call__.__code__.co_filename


class ThreadGuard:
    """Lets one thread at a time into the routes and forward passes of one model.

    Threads that autograd starts, as it does on a GPU, are let through: they recompute for the thread that
    waits for them.

    Attributes:
        thread: identity of the thread that is inside; None if there is none.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        self._depth = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[ThreadGuard], tuple[()]]:
        return ThreadGuard, ()  # a copy of a model is free

    def take(self) -> None:
        """Enters, or enters once more; raises RuntimeError if another thread is inside."""
        if _started_by_autograd():
            return
        thread = threading.get_ident()
        if self.thread != thread:
            if not self._lock.acquire(blocking=False):
                raise _refusal()
            self.thread = thread
        self._depth += 1

    def give(self) -> None:
        """Ends what `take` began."""
        if _started_by_autograd():
            return
        self._depth -= 1
        if self._depth == 0:
            self.thread = None
            self._lock.release()

    def check(self, foreign: bool = False) -> None:
        """Raises RuntimeError if another thread is inside.

        `foreign`: whether the caller can tell that the active route is not its own.
        """
        free = self.thread is None or self.thread == threading.get_ident()
        if foreign or not (free or _started_by_autograd()):
            raise _refusal()


def calling_frame() -> FrameType | None:
    """Returns the frame of the innermost `nn.Module.__call__`; it lasts as long as the call and its hooks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _MODULE_FILE:
        frame = frame.f_back
    while frame is not None and frame.f_back and frame.f_back.f_code.co_filename == _MODULE_FILE:
        frame = frame.f_back
    return frame


def is_running(frame: FrameType) -> bool:
    """Whether a frame of this thread has not ended."""
    outer: FrameType | None = sys._getframe(1)
    while outer is not None and outer is not frame:
        outer = outer.f_back
    return outer is frame


def inside_call() -> bool:
    """Whether this thread is inside the call of any module."""
    frame: FrameType | None = None if torch.compiler.is_compiling() else sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module.__call__.__code__:
        frame = frame.f_back
    return frame is not None or torch.compiler.is_compiling()


def inside_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _refusal() -> RuntimeError:
    return RuntimeError(
        "another thread is inside a forward pass, `generate` or route of this model, and only one thread at "
        "a time can be; guard these calls with a lock, or put the samples of all threads into one batch with "
        "adapter_names"
    )


def _started_by_autograd() -> bool:
    """Whether Python did not start this thread: it represents such threads as dummies."""
    return isinstance(threading.current_thread(), threading._DummyThread)
