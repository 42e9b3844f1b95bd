"""Real processes of a pipeline for tests, each running a snippet of Python as a launcher would start it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[2]

PREAMBLE = """
import os, signal, sys, threading, time
from mlora.pipeline import PeerError, Watch, World, neighbour_groups
world = World.from_launcher(timeout=20)
rank = world.rank
def ready():
    world.agree({}, 60, topic="ready")
    print("ready", flush=True)
def watch(**options):
    return Watch(world, lambda: f"a{rank}, b{rank}", **options)
"""


def environment(**changes: str) -> dict[str, str]:
    """The tests' environment, in which processes find this checkout and use one thread."""
    paths = [str(ROOT / "python"), str(ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **changes}


def contract(rank: int, size: int, port: int, *, launcher_holds_store: bool = True) -> dict[str, str]:
    """What torchrun tells a process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": str(launcher_holds_store),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


class Stages:
    """The processes of a test."""

    def __init__(self, bodies: Sequence[str], ranks: Sequence[int], port: int, holds_store: bool) -> None:
        size = len(bodies)
        self.processes = {
            rank: subprocess.Popen(
                [sys.executable, "-c", PREAMBLE + bodies[rank]],
                env=environment(**contract(rank, size, port, launcher_holds_store=holds_store)),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in ranks
        }

    def until_ready(self) -> None:
        """Wait until every process has printed its first line."""
        for process in self.processes.values():
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate(timeout=10)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a process a signal."""
        self.processes[rank].send_signal(number)

    def end(self, timeout: float = 60.0) -> tuple[list[int], list[str], list[str]]:
        """Wait for every process, and return exit codes, standard outputs and standard errors."""
        deadline = time.monotonic() + timeout
        texts = [
            process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            for process in self.processes.values()
        ]
        codes = [process.returncode for process in self.processes.values()]
        return codes, [out for out, _ in texts], [err for _, err in texts]


@contextmanager
def stages(*bodies: str, ranks: Sequence[int] | None = None, holds_store: bool = True) -> Iterator[Stages]:
    """Start one process per body, or only some of them, and leave none behind.

    Args:
        bodies: Python after ``PREAMBLE``, one per rank.
        ranks: those that are started at all.
        holds_store: the test holds the store, as a launcher would, and not the process of rank 0.
    """
    if holds_store:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
    else:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
    running = Stages(bodies, ranks or range(len(bodies)), port, holds_store)
    try:
        yield running
    finally:
        for process in running.processes.values():
            process.kill()
            process.wait()
