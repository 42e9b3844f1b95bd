"""Runs a command in a memory cgroup of its own, and prints the most that it held.

    python -m bench memory-limit 1GiB python train.py --epochs 1

The kernel enforces the limit on everything that the command's processes hold, page cache included, and says
how much that was at most. `RLIMIT_AS` and resident sizes do not bound or show that. Exits with the command's
code, or with 1 if a charge met the limit: the command then had to give up pages, or was killed.

Source: the kernel's Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from mlora.config.sections import parse_size
from shared.harness import documented_parser

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_NUMBERS = count()
_ENTER = 'echo $$ > "$0" && exec "$@"'
_SWAP = 1 << 20
"""Version 1 counts no failed charge where memory and swap together meet their limit first."""
_LOOK_AGAIN, _TRIES = 0.05, 200  # seconds between attempts to remove a group, and how many


@dataclass(frozen=True)
class Usage:
    """What the kernel says of a group.

    Attributes:
        limit: bytes.
        peak: the most bytes that were charged at once.
        failed: how often a charge met the limit; the kernel then reclaims pages or kills.
        killed: processes that were killed because nothing could be reclaimed.
    """

    limit: int
    peak: int
    failed: int
    killed: int


class MemoryGroup:
    """A cgroup that limits the memory of the commands started in it; version 1 or 2.

    Args:
        limit: bytes of memory; swap is not used, or at most 1 MiB of it.
        root: where the cgroup file systems are mounted.
        own: says which groups this process is in, as /proc/self/cgroup does.

    Raises:
        OSError: such a group cannot be made here; says what to do.

    Example:
        >>> with MemoryGroup(1 << 30) as group:
        ...     group.start(["python", "train.py"]).wait()
        ...     print(group.usage().peak)
    """

    def __init__(self, limit: int, *, root: Path = _ROOT, own: Path = _OWN) -> None:
        self.limit = limit
        parent, self.version = _parent(root, own.read_text().splitlines())
        self._folder = parent / f"mlora-bench-{os.getpid()}-{next(_NUMBERS)}"
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> MemoryGroup:
        try:
            self._folder.mkdir()
            self._set_limit()
        except OSError as error:
            self._remove()
            raise OSError(
                f"no memory cgroup can be made in {self._folder.parent} ({error.strerror}); run as root, or "
                "under `systemd-run --scope --property=Delegate=yes`"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._remove()

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command that enters the group before it runs; `options` are those of `Popen`."""
        entered = ["sh", "-c", _ENTER, str(self._folder / "cgroup.procs"), *command]
        self._started.append(subprocess.Popen(entered, **options))
        return self._started[-1]

    def usage(self) -> Usage:
        """Returns the peak and the failed charges so far.

        Raises:
            OSError: the kernel does not tell the peak; version 2 does from Linux 5.19 on.
        """
        if self.version == 1:
            events = _numbers(self._folder / "memory.oom_control")
            peak = self._read("memory.max_usage_in_bytes")
            failed = self._read("memory.failcnt")
        else:
            events = _numbers(self._folder / "memory.events")
            peak, failed = self._read("memory.peak"), events["max"]
        return Usage(self.limit, peak, failed, events.get("oom_kill", 0))

    def _set_limit(self) -> None:
        if self.version == 1:
            self._write("memory.limit_in_bytes", self.limit)
            self._write("memory.memsw.limit_in_bytes", self.limit + _SWAP, only_if_there=True)
        else:
            self._write("memory.max", self.limit)
            self._write("memory.swap.max", 0, only_if_there=True)

    def _write(self, name: str, value: int, only_if_there: bool = False) -> None:
        path = self._folder / name
        if path.exists() or not only_if_there:
            path.write_text(str(value))

    def _read(self, name: str) -> int:
        return int((self._folder / name).read_text())

    def _remove(self) -> None:
        """Ends what still runs in the group, and removes it."""
        for _ in range(_TRIES):
            if not self._folder.exists():
                return
            for process in (self._folder / "cgroup.procs").read_text().split():
                os.kill(int(process), signal.SIGKILL)
            try:
                self._folder.rmdir()
            except OSError:  # busy until the processes are gone
                time.sleep(_LOOK_AGAIN)


def _parent(root: Path, groups: Sequence[str]) -> tuple[Path, int]:
    """Returns the folder in which a group for memory can be made, and the version of cgroups."""
    paths: dict[str, str] = {}
    for line in groups:
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
    if "memory" in paths:
        mount, path, version = root / "memory", paths["memory"], 1
    else:
        mount, path, version = root, paths[""], 2
    own = mount / path
    if not own.is_dir():  # in a container, the path may be the host's
        own = mount
    return (own if version == 1 else _delegated(own, mount)), version


def _delegated(own: Path, mount: Path) -> Path:
    """Returns the nearest version-2 group that hands memory to groups in it.

    A group with processes in it cannot (except the root), so it may be the parent of this process's group.
    """
    for folder in (own, *own.parents):
        control = folder / "cgroup.subtree_control"
        if control.exists() and "memory" in control.read_text().split():
            return folder
        if folder == mount:
            break
    return own


def _numbers(path: Path) -> dict[str, int]:
    """Returns the numbers of a file with a name and a number in each line."""
    return {name: int(value) for name, value in (line.split() for line in path.read_text().splitlines())}


def main() -> int:
    """Runs the command and prints a line of JSON behind its output."""
    parser = documented_parser(__doc__)
    parser.add_argument("limit", help="bytes, or a size such as 1GiB")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="with its arguments")
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("command: expected one, got none")
    try:
        with MemoryGroup(parse_size(arguments.limit)) as group:
            code = group.start(arguments.command).wait()
            usage = group.usage()
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(usage)))
    return code or int(usage.failed > 0)
