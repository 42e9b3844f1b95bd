"""One job after the other in a child process, each with a time limit: a hang or a fault costs one job.

The parent never touches the GPU. It writes a job's name and arguments, as JSON, on a line of the child's
input and reads results from lines that begin with `MARK`. A child that fails or hangs is killed, and the next
job gets a new one.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

MARK = "result "
START_SECONDS = 60
"""For which a child may import torch and make a context, on top of its first job's own time."""


class Jobs:
    """Runs jobs in children.

    Args:
        command: starts a child, which calls `serve`.
        seconds: of all jobs together; those left over are skipped.
    """

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self._command, self._end = list(command), time.monotonic() + seconds
        self._child: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()

    def run(self, name: str, arguments: Sequence[Any], seconds: float) -> dict[str, Any]:
        """Returns a job's result, or `{"failed": why}`, `{"hung": what it said last}`, `{"skipped": why}`."""
        left = self._end - time.monotonic()
        if left < min(seconds, 5):
            return {"skipped": "no time left"}
        limit = min(seconds + (START_SECONDS if self._child is None else 0), left)
        child, said, end = self._child or self._start(), [""], time.monotonic() + limit
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps([name, arguments]) + "\n")
            child.stdin.flush()
        except OSError:
            pass  # it has ended: the lines say so
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                self.stop()
                return {"hung": f"no result in time; killed. {said[-1]}"}
            if line is None:
                code = child.wait()
                self.stop()
                return {"failed": f"the child ended with {code}. {said[-1]}"}
            if line.startswith(MARK):
                result: dict[str, Any] = json.loads(line.removeprefix(MARK))
                if "failed" in result:
                    self.stop()
                    result["failed"] += "".join(f" {text}" for text in said[-8:] if text)
                return result
            said.append(line.strip()[-300:])

    def stop(self) -> None:
        """Kills the child, and waits a while: the driver may hold a process whose GPU hangs."""
        if self._child is not None:
            self._child.kill()
            try:
                self._child.wait(10)
            except subprocess.TimeoutExpired:
                print("a killed child does not end; going on", flush=True)
            self._child = None

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )
        self._lines = queue.Queue()

        def read(child: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
            for line in child.stdout or ():
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, args=(self._child, self._lines), daemon=True).start()
        return self._child


def serve(make: Callable[[], Any]) -> None:
    """Does jobs of the standard input, which are methods of what `make` returns, until one fails."""
    worker = None
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            worker = worker or make()
            result = getattr(worker, name)(*arguments)
        except (RuntimeError, OSError, ValueError, TypeError, AttributeError, AssertionError) as error:
            print(MARK + json.dumps({"failed": f"{type(error).__name__}: {str(error)[:400]}"}), flush=True)
            os._exit(3)  # without destructors, which may wait for the GPU
        print(MARK + json.dumps(result), flush=True)
