"""Identifies processes, and what a watch and a launcher use of the system: clock, threads, process table."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_STATE, _PARENT, _START = 0, 1, 19  # fields of /proc/<pid>/stat, counted from the one after the name, proc(5)


@dataclass(frozen=True)
class Process:
    """One process; its start time tells it from a later process with the same number."""

    host: str  # the name of its machine
    pid: int  # its number there
    # the machine's boot and the pid namespace of `pid`. Empty if the system tells neither, as on macOS; then
    # no other process can inspect it.
    place: str = ""
    start: int = 0  # when it started, in clock ticks since the machine's start

    @classmethod
    def this(cls) -> Process:
        """Returns the calling process."""
        pid = os.getpid()
        fields = _fields(pid)
        return cls(socket.gethostname(), pid, _place(), int(fields[_START]) if fields else 0)

    def is_near(self, other: Process) -> bool:
        """Whether both run on one machine in one pid namespace."""
        return bool(self.place) and self.place == other.place

    def is_gone(self) -> bool:
        """Whether it has ended, collected by its parent or not. Only for a process that is near."""
        return self._state() in ("", "Z", "X")

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it. Only for a process that is near."""
        return self._state() in ("T", "t")

    def kill(self, parent: int) -> None:
        """Ends it with SIGKILL, if it has not ended and process `parent` started it. Only for a near one."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            fields = _fields(self.pid)  # read after opening: the handle never passes to a later process
            if not self.is_gone() and fields and int(fields[_PARENT]) == parent:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            os.close(handle)

    def _state(self) -> str:
        fields = _fields(self.pid)
        return fields[_STATE] if fields and int(fields[_START]) == self.start else ""


def _fields(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class System:
    """The operating system. Tests pass a simulated one, whose time passes at once."""

    def now(self) -> float:
        """Returns the time in seconds, from some moment on."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def event(self) -> threading.Event:
        return threading.Event()

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
        """Ends a process that this one's launcher has started, too, and no other."""
        process.kill(os.getppid())

    def write_error(self, line: str) -> None:
        """Writes to standard error, past Python's buffer and past a replaced `sys.stderr`."""
        os.write(2, line.encode(errors="backslashreplace"))

    def end(self, code: int) -> NoReturn:
        """Ends this process at once, whatever its main thread does."""
        os._exit(code)
