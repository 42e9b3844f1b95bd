"""A process that trains when it is told to, so that contenders with memory limits of their own take turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from offload.memory_group import MemoryGroup, Usage

_BENCH = Path(__file__).parents[1]
OURS, PEER = _BENCH / "offload_worker.py", _BENCH / "offload_peer.py"
_SHOWN = 200  # characters of the last line of a process that failed


class RemoteError(RuntimeError):
    """A process did not do its work."""


class Remote:
    """One process, in a memory cgroup if there is a limit.

    Args:
        script: `OURS` or `PEER`.
        job: what it trains; see the script's module.
        log: a file for what it prints to stderr.
        limit: bytes; None = there is none.
        python: the interpreter; default: this one.

    Raises:
        OSError: there can be no memory cgroup.
        RemoteError: it could not start.
    """

    def __init__(
        self,
        script: Path,
        job: Mapping[str, Any],
        log: Path,
        *,
        limit: int | None = None,
        python: str = sys.executable,
    ) -> None:
        self._log = log
        self._group = None if limit is None else MemoryGroup(limit)
        command = [python, str(script), json.dumps(job)]
        start = subprocess.Popen if self._group is None else self._group.__enter__().start
        beside = {"PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}  # for its own ninja
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with log.open("w") as errors:
            self._process: subprocess.Popen[str] = start(
                command, stderr=errors, env=os.environ | beside, **streams
            )
        try:
            self.ready = self._answer()
        except RemoteError:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the process, and removes its group."""
        self._process.kill()
        self._process.wait()
        if self._group is not None:
            self._group.__exit__(kind, error, trace)

    def train(self, way: str) -> dict[str, Any]:
        """Trains one step; returns its `seconds`, `processors` and `losses`.

        Args:
            way: `together`, `apart` or `one`; see the script's module.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(way + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer says why it is gone
        return self._answer()

    def usage(self) -> Usage:
        """Returns what the kernel says of its memory so far."""
        assert self._group is not None
        return self._group.usage()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # libraries print there, too
            if line.startswith("{"):
                return dict(json.loads(line))
        code = self._process.wait()
        killed = self._group is not None and self._group.usage().killed
        said = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        why = f"exit code {code}: {said[-1].strip()[:_SHOWN] if said else 'it said nothing'}"
        raise RemoteError("it was killed at its memory limit" if killed else why)
