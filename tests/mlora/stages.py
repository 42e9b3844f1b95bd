"""Real processes of a pipeline for tests, each running a snippet of Python as if by a launcher."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mlora.cluster.launch import local_store
from mlora.cluster.world import SECRET

ROOT = Path(__file__).resolve().parents[2]
FORKS = multiprocessing.get_context("forkserver")  # torch takes seconds to import, once
FORKS.set_forkserver_preload(
    ["mlora.run.run", "mlora.cli.app", "mlora.run.prepare", "peft", "matplotlib.pyplot"]
)

PREAMBLE = """
import os, signal, sys, threading, time
from mlora.cluster.watchdog import Watch
from mlora.cluster.world import PeerError, World
from mlora.pipeline import connect_neighbours
world = World.from_launcher(timeout=20)
rank = world.rank
def ready(watch=None):
    # with a watch: when each has read which adapters the others work on
    peers = watch._beats.others if watch else dict
    while watch and sum(bool(peer.in_flight) for peer in peers().values()) < world.size - 1:
        time.sleep(0.01)
    world.agree({}, 60)
    print("ready", flush=True)
def watch(**options):
    return Watch(world, lambda: f"a{rank}, b{rank}", **options)
"""

SESSION = "import os; os.setsid()\n"


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
        SECRET: "of this test",
    }


def run(body: str, told: dict[str, str], files: list[Path]) -> None:
    """What a process does: its output goes to two files."""
    for number, file in enumerate(files, start=1):
        with file.open("w") as stream:
            os.dup2(stream.fileno(), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os.environ.update(told)
    exec(body, {"__name__": "__main__"})


class Stages:
    """The processes of a test."""

    def __init__(self, bodies: Sequence[str], ranks: Sequence[int], told: list[dict[str, str]], folder: Path):
        self.files = {rank: [folder / f"{rank}.out", folder / f"{rank}.err"] for rank in ranks}
        self.processes = {
            rank: FORKS.Process(target=run, args=(PREAMBLE + bodies[rank], told[rank], self.files[rank]))
            for rank in ranks
        }
        for process in self.processes.values():
            process.start()

    def until_ready(self) -> None:
        """Wait until every process has printed its first line."""
        deadline = time.monotonic() + 60
        for out, err in self.files.values():
            while not (out.exists() and out.read_text().startswith("ready\n")):
                assert time.monotonic() < deadline, err.read_text()
                time.sleep(0.05)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a process a signal."""
        pid = self.processes[rank].pid
        assert pid
        os.kill(pid, number)

    def end(self, timeout: float = 60.0) -> tuple[list[int | None], list[str], list[str]]:
        """Wait for every process, and return exit codes, standard outputs and standard errors."""
        deadline = time.monotonic() + timeout
        for process in self.processes.values():
            process.join(max(deadline - time.monotonic(), 0.0))
        codes = [process.exitcode for process in self.processes.values()]
        outputs, errors = ([pair[i].read_text() for pair in self.files.values()] for i in (0, 1))
        assert None not in codes, (codes, outputs, errors)
        return codes, outputs, errors


@contextmanager
def stages(*bodies: str, ranks: Sequence[int] | None = None, holds_store: bool = True) -> Iterator[Stages]:
    """Start one process per body, or only some of them, and leave none behind.

    Args:
        bodies: Python after ``PREAMBLE``, one per rank.
        ranks: those that are started at all.
        holds_store: the test holds the store, as a launcher would, and not the process of rank 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        if holds_store:
            store = local_store()
            port = store.port
        else:
            port = free_port()
        told = [contract(r, len(bodies), port, launcher_holds_store=holds_store) for r in range(len(bodies))]
        running = Stages(bodies, ranks or range(len(bodies)), told, Path(folder))
        try:
            yield running
        finally:
            for process in running.processes.values():
                process.kill()
                process.join()


class Program:
    """A Python program in a session of its own, which need not import torch anew.

    Args:
        body: Python.
        environment: variables that it is told.
        folder: of its output.
    """

    def __init__(self, body: str, environment: dict[str, str], folder: Path) -> None:
        self.files = [folder / "out", folder / "err"]
        self.process = FORKS.Process(target=run, args=(SESSION + body, environment, self.files))
        self.process.start()
        assert self.process.pid
        self.pid = self.process.pid

    @property
    def code(self) -> int | None:
        """Its exit code, if it has ended."""
        return self.process.exitcode

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def end(self, timeout: float = 60.0) -> tuple[int, str, str]:
        """Wait for it, and return exit code, standard output and standard error."""
        self.process.join(timeout)
        output, error = (file.read_text() for file in self.files)
        assert self.code is not None, (output, error)
        return self.code, output, error


@contextmanager
def program(body: str, environment: dict[str, str]) -> Iterator[Program]:
    """Start a program, and leave it not behind."""
    with tempfile.TemporaryDirectory() as folder:
        running = Program(body, environment, Path(folder))
        try:
            yield running
        finally:
            running.process.kill()
            running.process.join()


def free_port() -> int:
    """Return a port that nobody listened on a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def until(true: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.05)
    return False


def state_of(pid: int) -> str:
    """A process's state, as proc(5) has it; Z or X: it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def is_alive(pid: int) -> bool:
    return state_of(pid) not in "ZX"
