"""The clock, the threads and the process table that a watch and a launcher use."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from .processes import Process


class System:
    """The operating system. Tests pass a simulated one, whose time passes at once."""

    def now(self) -> float:
        """Returns the time in seconds, from some moment on."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def event(self) -> threading.Event:
        return threading.Event()

    def lock(self) -> threading.Lock:
        return threading.Lock()

    def rlock(self) -> threading.RLock:
        """Returns a reentrant lock."""
        return threading.RLock()

    def start(self, work: Callable[[], object], name: str | None = None) -> threading.Thread:
        """Runs work in a thread that does not keep the process alive."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def is_gone(self, process: Process) -> bool:
        return process.is_gone()

    def is_stopped(self, process: Process) -> bool:
        return process.is_stopped()

    def kill(self, process: Process) -> None:
        process.kill()

    def write_error(self, line: str) -> None:
        """Writes to standard error, past Python's buffer and past a replaced `sys.stderr`."""
        os.write(2, line.encode(errors="backslashreplace"))

    def end(self, code: int) -> NoReturn:
        """Ends this process at once, whatever its main thread does."""
        os._exit(code)
