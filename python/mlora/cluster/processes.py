"""Identifies processes. One process can inspect and end another one on the same machine."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

_STATE, _START = 0, 19  # fields of /proc/<pid>/stat, counted from the one after the name, proc(5)


@dataclass(frozen=True)
class Process:
    """One process; its start time tells it from a later process with the same number.

    Attributes:
        host: the name of its machine.
        pid: its number there.
        place: the machine's boot and the pid namespace of `pid`. Empty if the system tells neither, as on
            macOS; then no other process can inspect it.
        start: when it started, in clock ticks since the machine's start.
    """

    host: str
    pid: int
    place: str = ""
    start: int = 0

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

    def kill(self) -> None:
        """Ends it with SIGKILL, if it has not ended. Only for a process that is near."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if not self.is_gone():  # checked after opening: the handle never passes to a later process
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
