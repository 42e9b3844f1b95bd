"""Starts a pipeline's processes on one machine and attends them until they end.

torch's launcher, the elastic agent, cannot end a run in order:

- After a signal `elastic_launch` raises `SignalException` and drops the processes' exit codes.
- When one process fails, the agent sends SIGTERM to the others before these can say what was wrong.
- After a fixed 30 seconds it kills those that are still at work.

The processes are told what `torchrun` tells them (`mlora.cluster.world.World`).
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

import torch.distributed as dist

from .processes import System
from .signals import URGENT, Caught, ending
from .world import SECRET

_LOOK_AGAIN = 0.1  # seconds
_GRACE = 20.0  # seconds for the others to end, once one has failed or the first stage has ended
_PATIENCE = 3.0  # seconds in which the others see for themselves that one has failed
_AFTER_SECOND_SIGNAL = 5.0  # seconds

Popen: TypeAlias = "subprocess.Popen[bytes]"


def launch(stages: int, arguments: Sequence[str]) -> int:
    """Runs a Python command in one process per stage, and waits until all have ended.

    Signals that end a run are passed on to stage 0, which ends it in order, in whatever time it takes. A
    second SIGINT or SIGTERM is passed on too, and a few seconds later all remaining processes are killed.
    When one process has failed or stage 0 has ended, the others get some seconds to end. Processes that have
    not met the failed one yet cannot see the failure. They are sent SIGTERM, as torchrun does; after a signal
    without delay. However this process itself ends, the others end too.

    Args:
        stages: number of processes.
        arguments: what follows `python`: `-m MODULE ...` or `FILE ...`.

    Returns:
        The exit code of the process that failed first, 128 + the signal that ended it, or 0.
    """
    store = local_store()
    command = (sys.executable, *_python_options(), "-m", "mlora.cluster.worker", str(os.getpid()), *arguments)
    processes: list[Popen] = []
    with _signals_caught(processes) as caught:
        try:
            for variables in _environments(stages, store.port):
                if not caught:
                    found = subprocess.Popen(command, env=os.environ | variables, start_new_session=True)
                    processes.append(found)
            if caught:  # stage 0 does not listen to signals yet
                return 128 + caught[0]
            return _attend(processes, caught)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def local_store() -> dist.TCPStore:
    """Returns a store that only this machine reaches: torch itself would listen at all addresses."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    file = listener.detach()  # the store closes it
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=file)


@contextmanager
def _signals_caught(processes: Sequence[Popen]) -> Iterator[list[int]]:
    """Inside `with`, collects the signals that end a run, and lets Ctrl-Z stop all processes."""
    caught = Caught()

    def catch(number: int, frame: FrameType | None) -> None:
        caught.note(number)

    def pause(number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for process in processes:
            process.send_signal(signal.SIGCONT)

    handlers = {**dict.fromkeys(ending(), catch), int(signal.SIGTSTP): pause}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield caught
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier or signal.SIG_DFL)


def _attend(processes: Sequence[Popen], caught: Sequence[int], system: System | None = None) -> int:
    """Passes signals on until every process has ended, and returns the exit code."""
    system = system or System()
    passed, failed, deadline, patience = 0, None, math.inf, math.inf
    terminated: list[Popen] | None = None
    while any(process.poll() is None for process in processes):
        now = system.now()
        if len(caught) > passed:
            processes[0].send_signal(caught[passed])
            passed += 1
            if caught[passed - 1] in URGENT and sum(number in URGENT for number in caught[:passed]) == 2:
                deadline = now + _AFTER_SECOND_SIGNAL
        failed = _first_failure(processes) if failed is None else failed
        if failed is not None or processes[0].poll() is not None:
            deadline = min(deadline, now + _GRACE)
            patience = min(patience, now + (0.0 if passed else _PATIENCE))
        if terminated is None and failed is not None and now > patience:
            terminated = _terminate(processes)
        if now > deadline:
            left = _kill(processes)
            if not passed:
                print(f"error: {_why(processes, failed)}stages {left} did not end; killed", file=sys.stderr)
        system.sleep(_LOOK_AGAIN)
    failed = _first_failure(processes) if failed is None else failed
    if terminated and not passed and failed is not None and processes[failed].returncode < 0:
        name = signal.Signals(-processes[failed].returncode).name
        print(f"error: stage {failed} (pid {processes[failed].pid}) was ended by {name}", file=sys.stderr)
    return 0 if failed is None else _code(processes[failed])


def _terminate(processes: Sequence[Popen]) -> list[Popen]:
    """Sends SIGTERM to the remaining processes, and returns them."""
    left = [process for process in processes if process.poll() is None]
    for process in left:
        process.terminate()
    return left


def _kill(processes: Sequence[Popen]) -> str:
    """Kills the remaining processes, and returns the numbers of their stages."""
    left = [stage for stage, process in enumerate(processes) if process.poll() is None]
    for stage in left:
        processes[stage].kill()
        processes[stage].wait()
    return ", ".join(map(str, left))


def _why(processes: Sequence[Popen], failed: int | None) -> str:
    if failed is None:
        return ""
    process = processes[failed]
    return f"stage {failed} (pid {process.pid}) ended with exit code {_code(process)}; "


def _first_failure(processes: Sequence[Popen]) -> int | None:
    """Returns a stage that has ended with an error, or by a signal."""
    return next((stage for stage, process in enumerate(processes) if process.poll()), None)


def _code(process: Popen) -> int:
    code = process.returncode
    return code if code >= 0 else 128 - code


def _python_options() -> list[str]:
    """Returns `-P`, unless this process itself finds the modules of the current folder."""
    return [] if sys.path[0] in ("", os.getcwd()) else ["-P"]


def _environments(stages: int, port: int) -> list[dict[str, str]]:
    """Returns each process's variables: torchrun's, the run's secret, and defaults that the user left."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(max(1, cores // stages)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # hides warnings of a lost store, which come with C++ stack traces
    }
    common = {key: value for key, value in defaults.items() if key not in os.environ} | {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": str(stages),
        "WORLD_SIZE": str(stages),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        SECRET: secrets.token_hex(32),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    return [common | {"RANK": str(stage), "LOCAL_RANK": str(stage)} for stage in range(stages)]
