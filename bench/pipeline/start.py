"""Starts the processes of a job: on this machine, or in two network namespaces.

The namespaces have no names. Each lives as long as a process that sleeps in it, which the system kills with
this one, and the veth pair ends with them: nothing is left behind, however this process ends.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mlora.cluster.launch import launch
from shared.machine import BENCH

INTERFACE = "mlora0"
_WORKER = [BENCH[1], "pipeline-worker"]
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_TOOLS = ("ip", "tc", "setpriv", "unshare", "nsenter")
_LOOK_AGAIN = 0.05  # seconds

Results = list[dict[str, Any]]


class JobError(Exception):
    """A job's processes did not do their work; one line."""


def run_job(job: dict[str, Any], processes: int) -> Results:
    """Run a job on this machine.

    Raises:
        JobError: one of them failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        code = launch(processes, [*_WORKER, _write(folder, job), folder])
        if code:
            raise JobError(f"a process of the benchmark ended with exit code {code}")
        return _read(folder, processes)


def run_network_job(job: dict[str, Any], rate: str) -> Results:
    """Run a job of two processes between two network namespaces.

    Args:
        job: as `worker.py` reads it.
        rate: of the link in each direction, in the words of `tc`.

    Raises:
        JobError: the namespaces cannot be made, or a process failed.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = _write(folder, job | {"interface": INTERFACE})
        run = uuid.uuid4().hex
        processes = []
        for rank, prefix in enumerate(stack.enter_context(joined_namespaces(rate))):
            command = [
                *prefix,
                sys.executable,
                "-m",
                "mlora.cluster.worker",
                str(os.getpid()),
                *_WORKER,
                path,
                folder,
            ]
            process = subprocess.Popen(command, env=os.environ | _environment(rank, run))
            stack.callback(_end, process)
            processes.append(process)
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            time.sleep(_LOOK_AGAIN)
        code = next((process.poll() for process in processes if process.poll()), 0)
        if code:
            raise JobError(f"a process in a network namespace ended with exit code {code}")
        return _read(folder, len(processes))


def why_no_network() -> str:
    """Why there can be no network namespaces here; empty if they can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if os.geteuid():
        return "network namespaces need root"
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: iproute2, util-linux)"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return " ".join(done.stderr.split())


@contextmanager
def joined_namespaces(rate: str) -> Iterator[list[list[str]]]:
    """Two network namespaces, joined by a veth pair that is shaped at both ends.

    Yields:
        For each, what to put before a command that shall run in it.

    Raises:
        JobError: they cannot be made.
    """
    with ExitStack() as stack:
        holders = [stack.enter_context(_holder()) for _ in _ADDRESSES]
        left, right = (str(holder.pid) for holder in holders)
        pair = ["name", INTERFACE, "netns", left, "type", "veth", "peer", "name", INTERFACE, "netns", right]
        _do(["ip", "link", "add", *pair])
        prefixes = [["nsenter", f"--net=/proc/{holder.pid}/ns/net"] for holder in holders]
        for prefix, address in zip(prefixes, _ADDRESSES, strict=True):
            _do([*prefix, "ip", "address", "add", f"{address}/24", "dev", INTERFACE])
            for name in ("lo", INTERFACE):
                _do([*prefix, "ip", "link", "set", name, "up"])
            bucket = ["tbf", "rate", rate, "burst", "16kb", "limit", "4mb"]
            _do([*prefix, "tc", "qdisc", "add", "dev", INTERFACE, "root", *bucket])
        yield prefixes


@contextmanager
def _holder() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps in a network namespace of its own."""
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"]
    process = subprocess.Popen(command)
    try:
        own, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + 10
        while os.readlink(f"/proc/{process.pid}/ns/net") == own:
            if process.poll() is not None or time.monotonic() > deadline:
                raise JobError("a network namespace cannot be made")
            time.sleep(_LOOK_AGAIN)
        yield process
    finally:
        _end(process)


def _do(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise JobError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _environment(rank: int, run: str) -> dict[str, str]:
    """What torchrun would tell a process of two that share no machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": _ADDRESSES[0],
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # the addresses have no names
    }


def _write(folder: str, job: dict[str, Any]) -> str:
    path = Path(folder) / "job.json"
    path.write_text(json.dumps(job))
    return str(path)


def _read(folder: str, processes: int) -> Results:
    return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]
