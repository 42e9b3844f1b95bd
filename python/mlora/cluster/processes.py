"""Which process is which: on one machine a process can be looked at, and ended, by another one."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

_STATE, _START = 0, 19  # of /proc/<pid>/stat, counted from what follows the name, proc(5)


@dataclass(frozen=True)
class Process:
    """One process, told from a later one with the same number by the time of its start.

    Attributes:
        host: the name of its machine.
        pid: its number there.
        place: the machine's boot and the numbering (pid namespace) that ``pid`` belongs to; empty where the
            system tells neither, as on macOS, and then no other process can look at it.
        start: when it started, in clock ticks after the machine did.
    """

    host: str
    pid: int
    place: str = ""
    start: int = 0

    @classmethod
    def this(cls) -> Process:
        """Return the one that calls."""
        pid = os.getpid()
        fields = _fields(pid)
        return cls(socket.gethostname(), pid, _place(), int(fields[_START]) if fields else 0)

    def is_near(self, other: Process) -> bool:
        """Say whether both run on one machine and number processes alike."""
        return bool(self.place) and self.place == other.place

    def is_gone(self) -> bool:
        """Say whether it has ended, collected by its parent or not. Of a process that is near only."""
        return self._state() in ("", "Z", "X")

    def is_stopped(self) -> bool:
        """Say whether a signal or a debugger has stopped it. Of a process that is near only."""
        return self._state() in ("T", "t")

    def kill(self) -> None:
        """End it with SIGKILL, if it has not ended. Of a process that is near only."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if not self.is_gone():  # looked at after opening: the handle stays with what was opened
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
