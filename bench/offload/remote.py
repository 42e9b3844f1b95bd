"""A process that trains when it is told to, so that contenders with memory limits of their own take turns."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from shared.machine import BENCH

from offload.memory_group import MemoryGroup, Usage

OURS = (*BENCH, "offload-worker")
PEER = str(Path(__file__).with_name("peers.py"))
_SHOWN = 400  # characters of the last line of a process that failed


class RemoteError(RuntimeError):
    """A process did not do its work.

    Attributes:
        killed: whether it met its limit, or took too long.
    """

    def __init__(self, message: str, *, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


class Remote:
    """One process, in a memory cgroup if there is a limit; it ends with the context.

    Args:
        command: that reads a way to train from each line; it gets the job as its last argument.
        job: what it trains, see `worker.py` and `peers.py`.
        log: a file for what it prints to stderr.
        limit: bytes; None = there is none.
        patience: seconds for which an answer is waited.

    Raises:
        OSError: there can be no memory cgroup.
        RemoteError: it could not start.
    """

    def __init__(
        self,
        command: Sequence[str],
        job: Mapping[str, Any],
        log: Path,
        *,
        limit: int | None = None,
        patience: float | None = None,
    ) -> None:
        self._log, self._patience, self._stack = log, patience, ExitStack()
        self._group = None if limit is None else self._stack.enter_context(MemoryGroup(limit))
        start = subprocess.Popen if self._group is None else self._group.start
        beside = {"PATH": f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}"}  # for its own ninja
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with log.open("w") as errors:
            words = [*command, json.dumps({**job, "limit": limit})]
            self._process: subprocess.Popen[str] = start(
                words, stderr=errors, env=os.environ | beside, **streams
            )
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.ready = self._answer()
        except RemoteError:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process, and removes its group."""
        self._process.kill()
        self._process.wait()
        self._stack.close()

    def train(self, way: str) -> dict[str, Any]:
        """Trains one step; returns its `seconds`, `processors` and `losses`."""
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

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print there, too
                self._answers.put(line)
        self._answers.put(None)

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=self._patience)
        except queue.Empty:
            raise RemoteError(f"gave no answer in {self._patience:.0f} s", killed=True) from None
        if line is not None:
            return dict(json.loads(line))
        code = self._process.wait()
        killed = self._group is not None and self._group.usage().killed > 0
        said = [one for one in self._log.read_text(errors="replace").splitlines() if one.strip()]
        why = f"exit code {code}: {said[-1].strip()[:_SHOWN] if said else 'it said nothing'}"
        raise RemoteError("it was killed at its memory limit" if killed else why, killed=killed)


def ours(job: Mapping[str, Any], folder: Path, name: str, **how: Any) -> Remote:
    """Starts this library's process; this interpreter runs it."""
    assert OURS[0] == sys.executable
    return Remote(OURS, job, folder / f"{name}.log", **how)
