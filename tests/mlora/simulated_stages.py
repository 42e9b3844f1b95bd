"""Stages of a pipeline that are simulated: clock, processes, threads and store, to test the watch in no time.

One thread runs at a time, until it waits. The clock goes on where all wait. Which of several threads runs
next, and how long the store takes, is drawn from a seed.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from mlora.cluster.processes import Process, System
from mlora.cluster.watchdog import Watch
from mlora.cluster.world import World

KILLED = -9
LATENCY = 0.005  # seconds that the store takes at most


class Ended(BaseException):
    """Unwinds a thread of a process that has ended."""


def taken() -> threading.Lock:
    """A lock that the one who waits for it has taken, and another one releases."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Thread(threading.Thread):
    """One of a stage's threads."""

    def __init__(self, stage: Stage, work: Callable[[], object], name: str | None = None) -> None:
        super().__init__(name=name, daemon=True)
        self.stage, self.work, self.is_main = stage, work, name == "main"
        self.turn = taken()
        self.until: Callable[[], bool] = lambda: True
        self.deadline = math.inf
        self.finished = False
        self.interrupted: BaseException | None = None

    def run(self) -> None:
        code = 0
        self.turn.acquire()
        try:
            self.stage.check()
            self.work()
        except Ended:
            pass
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException as error:  # noqa: BLE001 - the test judges
            code = 1
            if not self.is_main:
                self.stage.tracebacks.append(repr(error))
        finally:
            if self.is_main:
                self.stage.die(code)
            self.finished = True
            self.stage.simulation.back.release()

    def is_alive(self) -> bool:
        return not self.finished

    def join(self, timeout: float | None = None) -> None:
        self.stage.wait(lambda: self.finished, timeout)


class Event(threading.Event):
    """One that simulated threads wait for."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def wait(self, timeout: float | None = None) -> bool:
        self.stage.wait(self.is_set, timeout)
        return self.is_set()


class Lock:
    """One that simulated threads take, again and again."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.owner: threading.Thread | None = None
        self.depth = 0

    def acquire(self, blocking: bool = True) -> bool:
        me = threading.current_thread()
        if self.owner and self.owner is not me:
            if not blocking:
                return False
            self.stage.wait(lambda: self.owner is None)
        self.owner, self.depth = me, self.depth + 1
        return True

    def release(self) -> None:
        self.depth -= 1
        if not self.depth:
            self.owner = None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Store:
    """A stage's connection to the store, which is in a stage's process or in the launcher's."""

    def __init__(self, stage: Stage, timeout: float = 60.0) -> None:
        self.stage, self.timeout = stage, timeout
        self.simulation = stage.simulation

    def clone(self) -> Store:
        return Store(self.stage, self.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout.total_seconds()

    def reach(self) -> dict[str, bytes]:
        """Wait for an answer; return what the store holds."""
        simulation = self.simulation
        self.stage.sleep(LATENCY * simulation.draw.random())
        self.stage.wait(lambda: simulation.store_is_gone or not simulation.store_is_frozen, self.timeout)
        if simulation.store_is_gone:
            raise dist.DistNetworkError("the connection is closed")
        if simulation.store_is_frozen:
            raise dist.DistStoreError("the store has not answered in time")
        return simulation.values

    def set(self, key: str, value: str) -> None:
        self.reach()[key] = value.encode()

    def check(self, keys: Sequence[str]) -> bool:
        values = self.reach()
        return all(key in values for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values = self.reach()
        return [values[key] for key in keys]

    def compare_set(self, key: str, expected: str | bytes, desired: str) -> bytes:
        values, before = self.reach(), expected if isinstance(expected, bytes) else expected.encode()
        if values.get(key, b"") == before:
            values[key] = desired.encode()
        return values.get(key, before)


class Stage(System):
    """A process and what it sees of the system.

    Attributes:
        code: its exit code, if it has ended.
        ended_at: when.
        stopped: as SIGSTOP does.
        held: a call keeps Python's lock, so that no thread of Python goes on.
        lines: what it wrote to standard error, past Python.
        tracebacks: errors that ended its threads other than the main one. A test takes those away that it
            expects.
    """

    def __init__(self, simulation: Simulation, rank: int, machine: str) -> None:
        self.simulation, self.rank = simulation, rank
        self.process = Process(machine, 1000 + rank, f"boot of {machine}")
        self.code: int | None = None
        self.ended_at = math.inf
        self.stopped = self.held = False
        self.lines: list[str] = []
        self.tracebacks: list[str] = []

    def watch(self, **options: Any) -> Watch:
        """Watch the others; the adapters a{rank} and b{rank} are in flight."""
        store: Any = Store(self)
        world = World(self.rank, len(self.simulation.stages), self.rank, store, self.process)
        options.setdefault("describe", lambda: f"a{self.rank}, b{self.rank}")
        return Watch(world, system=self, **options)

    def wait(self, until: Callable[[], bool], seconds: float | None = None) -> None:
        """Let others run until something is true, the time is over, or this process has ended."""
        self.check()
        thread = threading.current_thread()
        assert isinstance(thread, Thread)
        thread.until, thread.deadline = until, math.inf if seconds is None else self.now() + seconds
        self.simulation.back.release()
        thread.turn.acquire()
        self.check()
        if thread.interrupted:
            error, thread.interrupted = thread.interrupted, None
            raise error

    def receive(self, *peers: int) -> NoReturn:
        """Wait for what never comes, until the connection to a peer breaks."""
        others = [self.simulation.stages[rank] for rank in peers]
        self.wait(lambda: any(other.code is not None for other in others))
        raise dist.DistNetworkError("connection closed by peer")

    def interrupt(self, error: BaseException) -> None:
        """Raise an error in the main thread, as a signal's handler would."""
        (main,) = (thread for thread in self.simulation.threads if thread.stage is self and thread.is_main)
        main.interrupted, main.until = error, lambda: True

    def check(self) -> None:
        if self.code is not None or self.simulation.over:
            raise Ended

    def die(self, code: int = KILLED) -> None:
        if self.code is None and not self.simulation.over:
            self.code, self.ended_at = code, self.simulation.now

    def stop(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        self.stopped = False

    def now(self) -> float:
        return self.simulation.now

    def sleep(self, seconds: float = math.inf) -> None:
        self.wait(lambda: False, seconds)

    def event(self) -> threading.Event:
        return Event(self)

    def rlock(self) -> Any:
        return Lock(self)

    def start(self, work: Callable[[], object], name: str | None = None) -> threading.Thread:
        thread = Thread(self, work, name)
        thread.start()
        self.simulation.threads.append(thread)
        return thread

    def is_gone(self, process: Process) -> bool:
        return self.simulation.stage_of(self, process).code is not None

    def is_stopped(self, process: Process) -> bool:
        return self.simulation.stage_of(self, process).stopped

    def kill(self, process: Process) -> None:
        self.simulation.stage_of(self, process).die()

    def write_error(self, line: str) -> None:
        self.check()
        self.lines.append(line)

    def end(self, code: int) -> NoReturn:
        self.die(code)
        raise Ended


class Simulation:
    """The stages and their store.

    Attributes:
        now: seconds since the beginning.
        launcher: "runs", "stopped" or "gone", with its store where it holds that.
    """

    def __init__(self, machines: Sequence[str], store_in: int | None, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.over = False
        self.launcher = "runs"
        self.store_in = store_in
        self.values: dict[str, bytes] = {}
        self.back = taken()
        self.threads: list[Thread] = []
        self.actions: list[tuple[float, Callable[[], object]]] = []
        self.stages = [Stage(self, rank, machine) for rank, machine in enumerate(machines)]

    @property
    def store_is_gone(self) -> bool:
        return (
            self.launcher == "gone" if self.store_in is None else self.stages[self.store_in].code is not None
        )

    @property
    def store_is_frozen(self) -> bool:
        return self.launcher == "stopped" if self.store_in is None else self.stages[self.store_in].stopped

    @property
    def codes(self) -> list[int | None]:
        return [stage.code for stage in self.stages]

    @property
    def lines(self) -> list[str]:
        return [line for stage in self.stages for line in stage.lines]

    def stage_of(self, looks: Stage, process: Process) -> Stage:
        (found,) = (stage for stage in self.stages if stage.process == process)
        assert process.is_near(looks.process), "one cannot look at a process of another machine"
        return found

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Have something happen at a time."""
        self.actions = sorted([*self.actions, (seconds, action)], key=lambda entry: entry[0])

    def run(self, seconds: float = 120.0) -> None:
        """Run until every process has ended, or until that time."""
        while None in self.codes and self.now < seconds:
            while self.actions and self.actions[0][0] <= self.now:
                self.actions.pop(0)[1]()
            waiting = [
                thread
                for thread in self.threads
                if not (thread.finished or thread.stage.stopped or thread.stage.held)
                and thread.stage.code is None
            ]
            ready = [thread for thread in waiting if thread.deadline <= self.now or thread.until()]
            if ready:
                self.go_on(self.draw.choice(ready))
                continue
            later = [thread.deadline for thread in waiting] + [at for at, _ in self.actions] + [seconds]
            self.now = min(later)

    def go_on(self, thread: Thread) -> None:
        thread.turn.release()
        self.back.acquire()

    def close(self) -> None:
        self.over = True
        for thread in self.threads:
            while not thread.finished:
                self.go_on(thread)
            threading.Thread.join(thread)
        assert not [error for stage in self.stages for error in stage.tracebacks]


@contextmanager
def simulated(
    *bodies: Callable[[Stage], object],
    machines: Sequence[str] | None = None,
    store_in: int | None = None,
    seed: int = 0,
) -> Iterator[Simulation]:
    """Make one process per body, which the test then runs.

    Args:
        bodies: what the main thread of each does.
        machines: of each; all on one without.
        store_in: the stage whose process holds the store; the launcher's without.
        seed: of what goes on when.
    """
    simulation = Simulation(machines or ["one"] * len(bodies), store_in, seed)
    for stage, body in zip(simulation.stages, bodies, strict=True):
        stage.start(lambda stage=stage, body=body: body(stage), "main")  # type: ignore[misc]
    try:
        yield simulation
    finally:
        simulation.close()
