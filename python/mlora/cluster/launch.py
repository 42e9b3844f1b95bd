"""Starts a pipeline's processes on one machine and attends them until they end.

This is torch's launcher without its elastic agent, because the agent cannot end a run in order:

- After a signal `elastic_launch` raises `SignalException` and drops the processes' exit codes.
- When one process fails, the agent sends SIGTERM to the others before these can say what was wrong.
- After a fixed 30 seconds it kills those that are still at work.

This module uses only `start_processes`, by which the agent starts its processes. They are told what
`torchrun` tells them (`mlora.cluster.world.World`).
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    SignalException,
    SubprocessContext,
    start_processes,
)

from .processes import System

_LOOK_AGAIN = 0.1  # seconds
_GRACE = 20.0  # seconds for the others to end, once one has failed or the first stage has ended
_PATIENCE = 3.0  # seconds in which the others see for themselves that one has failed
_AFTER_SECOND_SIGNAL = 5.0  # seconds
_CATCHES = (signal.SIGINT, signal.SIGTERM)
_TORCH_CATCHES = (*_CATCHES, signal.SIGHUP, signal.SIGQUIT)

Process: TypeAlias = "subprocess.Popen[bytes]"
Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int


def launch(stages: int, arguments: Sequence[str]) -> int:
    """Runs a Python command in one process per stage, and waits until all have ended.

    SIGINT and SIGTERM are passed on to stage 0, which ends the run in order, in whatever time it takes. A
    second one is passed on too, and a few seconds later all remaining processes are killed. When one process
    has failed or stage 0 has ended, the others get some seconds to end. Processes that have not met the
    failed one yet cannot see the failure. They are sent SIGTERM, as torchrun does; after a signal without
    delay. However this process itself ends, the others end too.

    Args:
        stages: number of processes.
        arguments: what follows `python`: `-m MODULE ...` or `FILE ...`.

    Returns:
        The exit code of the process that failed first, 128 + the signal that ended it, or 0.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = (*_python_options(), "-m", "mlora.cluster.worker", str(os.getpid()), *arguments)
    with _handlers_kept() as before:
        try:
            context = start_processes(
                name="mlora",
                entrypoint=sys.executable,
                args=dict.fromkeys(range(stages), command),
                envs=_environments(stages, store.port),
                logs_specs=DefaultLogsSpecs(os.devnull),
            )
        except SignalException as error:  # torch has ended those that it had started
            return 128 + error.sigval
        assert isinstance(context, SubprocessContext)
        processes = [context.subprocess_handlers[stage].proc for stage in range(stages)]
        for number in _TORCH_CATCHES:
            signal.signal(number, before[number])
        try:
            return _attend(processes, _caught(processes))
        finally:
            context.close(signal.SIGKILL)  # ends torch's threads too


def _caught(processes: Sequence[Process]) -> list[int]:
    """Collects SIGINT and SIGTERM from now on, and lets Ctrl-Z stop all processes."""
    caught: list[int] = []

    def pause(number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for process in processes:
            process.send_signal(signal.SIGCONT)

    for number in _CATCHES:
        signal.signal(number, lambda number, frame: caught.append(number))
    signal.signal(signal.SIGTSTP, pause)
    return caught


def _attend(processes: Sequence[Process], caught: Sequence[int], system: System | None = None) -> int:
    """Passes signals on until every process has ended, and returns the exit code."""
    system = system or System()
    passed, failed, deadline, patience = 0, None, math.inf, math.inf
    terminated: list[Process] | None = None
    while any(process.poll() is None for process in processes):
        now = system.now()
        if len(caught) > passed:
            processes[0].send_signal(caught[passed])
            passed += 1
            deadline = now + _AFTER_SECOND_SIGNAL if passed == 2 else deadline
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


def _terminate(processes: Sequence[Process]) -> list[Process]:
    """Sends SIGTERM to the remaining processes, and returns them."""
    left = [process for process in processes if process.poll() is None]
    for process in left:
        process.terminate()
    return left


def _kill(processes: Sequence[Process]) -> str:
    """Kills the remaining processes, and returns the numbers of their stages."""
    left = [stage for stage, process in enumerate(processes) if process.poll() is None]
    for stage in left:
        processes[stage].kill()
        processes[stage].wait()
    return ", ".join(map(str, left))


def _why(processes: Sequence[Process], failed: int | None) -> str:
    if failed is None:
        return ""
    process = processes[failed]
    return f"stage {failed} (pid {process.pid}) ended with exit code {_code(process)}; "


def _first_failure(processes: Sequence[Process]) -> int | None:
    """Returns a stage that has ended with an error, or by a signal."""
    return next((stage for stage, process in enumerate(processes) if process.poll()), None)


def _code(process: Process) -> int:
    code = process.returncode
    return code if code >= 0 else 128 - code


def _python_options() -> list[str]:
    """Returns `-P`, unless this process itself finds the modules of the current folder."""
    return [] if sys.path[0] in ("", os.getcwd()) else ["-P"]


def _environments(stages: int, port: int) -> dict[int, dict[str, str]]:
    """Returns each process's variables: torchrun's, and defaults for those that the user has not set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {
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
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    return {stage: common | {"RANK": str(stage), "LOCAL_RANK": str(stage)} for stage in range(stages)}


@contextmanager
def _handlers_kept() -> Iterator[dict[int, Handler]]:
    """Restores the signal handlers that torch's launcher and this one replace."""
    numbers = (*_TORCH_CATCHES, signal.SIGTSTP)
    before: dict[int, Handler] = {n: signal.getsignal(n) or signal.SIG_DFL for n in numbers}
    try:
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
