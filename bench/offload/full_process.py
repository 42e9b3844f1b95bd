"""Runs `full_worker` in a process of its own, with or without a limit on its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from offload.memory_group import MemoryGroup
from offload.remote import RemoteError

_SHOWN = 400  # characters of what a process that failed had said


class FullError(RemoteError):
    """The process did not train.

    Attributes:
        killed: whether it met its limit.
    """

    def __init__(self, message: str, *, killed: bool) -> None:
        super().__init__(message)
        self.killed = killed


def train_full(job: Mapping[str, Any], limit: int | None = None, patience: float = 300.0) -> dict[str, Any]:
    """Trains in a process of its own.

    Args:
        job: see `full_worker`.
        limit: bytes of a memory cgroup; None = there is none.
        patience: seconds after which the process is ended.

    Returns:
        What the worker prints; under a limit with `usage`, the kernel's view of the cgroup.

    Raises:
        OSError: there can be no memory cgroup.
        FullError: it was killed, failed, or took too long.
    """
    command = [sys.executable, "-m", "offload.full_worker", json.dumps({**job, "limit": limit})]
    options: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    }
    with ExitStack() as stack:
        group = None if limit is None else stack.enter_context(MemoryGroup(limit))
        process = subprocess.Popen(command, **options) if group is None else group.start(command, **options)
        stack.callback(process.kill)
        try:
            said, errors = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired as error:
            raise FullError(f"was not done after {patience:.0f} s", killed=True) from error
        usage = None if group is None else group.usage()
        if process.returncode:
            killed = usage is not None and usage.killed > 0
            cause = " ".join(errors.split())[-_SHOWN:]
            what = "was killed at its memory limit" if killed else f"exit code {process.returncode}: {cause}"
            raise FullError(what, killed=killed)
    found = next(json.loads(line) for line in said.splitlines() if line.startswith("{"))
    return dict(found) | ({} if usage is None else {"usage": asdict(usage)})
