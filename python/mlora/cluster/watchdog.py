"""Notices within seconds that a process of the pipeline is dead or stuck, and then ends all processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

import torch.distributed as dist

from .heartbeats import Beats, Fault
from .processes import Process, System
from .world import PeerError, World

_TICK = 0.25  # seconds between two looks at the processes of this machine
_ELECTION = 2.0  # seconds in which a lower stage may claim to tell the user
_SETTLES = 0.75  # seconds in which a process that has closed its connections is seen to have ended
_GOODBYE = 30.0  # seconds that rank 0 waits for the others' goodbye
_OWN_ERROR = 2.0  # seconds in which a peer that has just died explains an error of this process


class Watch:
    """Watches the other processes of a pipeline from its own threads, as every process does.

    Each process gives a sign of life every second through the store. A process is at fault if it

    - has been silent for `patience` seconds,
    - has been at the same piece of work for `limit` seconds,
    - runs on this machine and has ended without `goodbye`, or
    - reports a fault of its own.

    A store that does not answer is a fault, too. On a fault the lowest live stage prints one line, a stuck
    process on this machine is killed, and every process ends with exit code 1, whatever its main thread does.

    The threads need Python's lock: a call that holds it for `patience` seconds looks like a stuck process.

    Args:
        describe: returns the names of the adapters in flight, for the line. A thread calls it every second,
            so it must return at once.
        on_fault: called before this process ends, for a second at most, for example to restore a terminal.
        work: returns the number of the current piece of work, 0 = none; called like `describe`.
        patience: seconds of silence that are no fault yet.
        limit: seconds at one piece of work that are no fault yet. A process with a hung thread still gives
            signs of life.
        interval: seconds from one sign of life to the next.
        system: the clock, the threads and the process table.

    Example:
        >>> with Watch(world, lambda: ", ".join(running)) as watch:
        ...     train()
    """

    def __init__(
        self,
        world: World,
        describe: Callable[[], str],
        on_fault: Callable[[Fault], None] | None = None,
        work: Callable[[], int] = lambda: 0,
        *,
        patience: float = 6.0,
        limit: float = 1800.0,
        interval: float = 1.0,
        system: System | None = None,
    ) -> None:
        self._world = world
        self._system = system or System()
        self._on_fault = on_fault
        self._patience, self._limit = patience, limit
        self._beats = Beats(world, describe, work, 10 * patience, interval, self._system)
        # held by whatever ends the watch; reentrant: a report that a signal interrupted can be made again
        self._ends = self._system.rlock()
        self._last_round, self._store_silence, self._lost_for = 0, 0.0, 0.0
        self._has_store = True
        self._gone: dict[int, int] = {}
        self._near_at: dict[int, float] = {}
        self._stopped = self._system.event()
        self._thread = self._system.start(self._guard, "mlora-watch")

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Says goodbye, or reports the error that ended the block."""
        if error is None:
            self.goodbye()
            return
        from_peer = isinstance(error, PeerError | dist.DistError)
        lines = str(error).strip().splitlines() or [""]
        message = f"{type(error).__name__}: {lines[0]}".removesuffix(": ")
        if isinstance(error, SystemExit):
            message = "was told to end"
        self.report(message, after=self._patience + _ELECTION if from_peer else _OWN_ERROR)

    def report(self, message: str, *, told: bool = False, after: float = 0.0) -> bool:
        """Tells the others of a fault of this process, which then has to end by itself.

        Args:
            told: the caller tells the user, so no line is printed here.
            after: seconds to wait for a fault of another process, which may be the cause. That fault goes
                first and ends this process.

        Returns:
            Whether no other process has told the user of a fault.
        """
        if self._stopped.wait(after):
            return True
        self._ends.acquire()  # blocks if the guard has it, and then this process ends
        me = self._world.process
        text = self._with_adapters(message)
        mine = self._tell(Fault(self._world.rank, me.host, me.pid, text, own=True), told=told)
        self._stop()
        return mine

    def goodbye(self) -> None:
        """Tells the others that this process has done its work and may end.
        Rank 0 waits for the others' goodbye: its process may hold the store."""
        if self._stopped.is_set():
            return
        self._beats.give(goodbye=True)
        deadline = self._system.now() + _GOODBYE
        while self._world.rank == 0 and not self._all_done() and self._system.now() < deadline:
            self._beats.hurry()
            self._stopped.wait(0.05)
        self.close()

    def close(self) -> None:
        """Stops watching. Without a goodbye, the others take the end of this process for a fault."""
        if not self._stopped.is_set():
            self._ends.acquire()
            self._stop()

    def _stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._beats.stop()

    def _all_done(self) -> bool:
        seen = self._beats.others()
        return len(seen) == self._world.size - 1 and all(peer.goodbye for peer in seen.values())

    def _guard(self) -> None:
        before = self._system.now()
        while not self._stopped.wait(_TICK):
            now = self._system.now()
            fault = self._find(min(now - before, 2 * _TICK))
            before = now
            if fault and self._ends.acquire(blocking=False):
                self._end(fault)

    def _find(self, elapsed: float) -> Fault | None:
        seen = sorted(self._beats.others().items())
        for _, peer in seen:
            if peer.fault:
                return peer.fault
        for rank, peer in seen:
            if not peer.goodbye and self._has_gone(rank, peer.process):
                return self._fault(rank, "was killed or ended")
        for rank, peer in seen:
            silence = self._beats.silence[rank]
            if not peer.goodbye and silence > self._patience:
                return self._fault(rank, f"has not answered for {silence:.0f} s")
            if not peer.goodbye and peer.busy > self._limit:
                return self._fault(rank, f"hangs: at one micro-batch for {peer.busy:.0f} s")
        return self._store_fault(elapsed)

    def _has_gone(self, rank: int, process: Process) -> bool:
        """Whether a process of this machine has ended, and its last sign has been read after that."""
        if not process.is_near(self._world.process):
            return False
        if not self._system.is_gone(process):
            if not self._system.is_stopped(process):
                self._near_at[rank] = self._system.now()
            return False
        since = self._gone.setdefault(rank, self._beats.rounds)
        self._beats.hurry()
        return self._beats.lost or self._beats.rounds >= since + 2

    def _store_fault(self, elapsed: float) -> Fault | None:
        """Returns the fault of a silent store, which is in the process of rank 0 or in its launcher."""
        before, self._last_round = self._last_round, self._beats.rounds
        self._store_silence = 0.0 if self._beats.rounds != before else self._store_silence + elapsed
        lost = not self._beats.thread.is_alive()
        self._lost_for += elapsed if lost else 0.0
        if self._store_silence <= self._patience and self._lost_for <= _SETTLES:
            return None
        self._has_store = False
        if lost and not self._beats.lost:
            return self._fault(self._world.rank, "gives no sign of life any more, after the error above")
        silent = "was killed or ended" if lost else f"has not answered for {self._store_silence:.0f} s"
        first = self._beats.others().get(0)
        near = first is not None and first.process.is_near(self._world.process)
        if first and near and self._is_gone_or_stopped(first.process):
            return self._fault(0, silent)
        who = "its launcher" if self._world.rank == 0 or near else "it or its launcher"
        return self._fault(0, f"cannot be reached: {who} {silent}")

    def _is_gone_or_stopped(self, process: Process) -> bool:
        return self._system.is_gone(process) or self._system.is_stopped(process)

    def _fault(self, rank: int, message: str) -> Fault:
        sign = self._beats.sign if rank == self._world.rank else self._beats.others().get(rank)
        text = self._with_adapters(message, sign.in_flight if sign else "")
        return Fault(rank, sign.process.host, sign.process.pid, text) if sign else Fault(rank, "", 0, text)

    def _with_adapters(self, message: str, in_flight: str = "") -> str:
        """Adds to a message the adapters in flight on its stage, or else on this or another one."""
        texts = [in_flight, self._beats.describe(), self._beats.sign.in_flight]
        texts += [peer.in_flight for peer in self._beats.others().values()]
        return next((f"{message}; adapters in flight: {text}" for text in texts if text), message)

    def _end(self, fault: Fault) -> None:
        try:
            self._tell(fault)
            stuck = self._beats.others().get(fault.stage)
            if stuck and not fault.own and stuck.process.is_near(self._world.process):
                self._system.kill(stuck.process)
        finally:
            self._system.end(1)

    def _tell(self, fault: Fault, *, told: bool = False) -> bool:
        """Tells the others of a fault; returns whether this process is elected to tell the user."""
        elected: list[bool] = []
        if self._has_store:
            self._bounded(lambda: elected.append(self._is_elected(fault, told)), _ELECTION + 1)
        mine = elected[0] if elected else self._is_lowest_here(fault)
        if not mine and not self._has_store:
            self._system.sleep(_ELECTION)  # this process's end would look like a fault to the one that tells
        self._bounded(lambda: self._say(fault, aloud=mine and not told), 1.5)
        if self._world.rank == 0 and self._has_store:
            self._wait_for_readers(fault)
        return mine

    def _wait_for_readers(self, fault: Fault) -> None:
        """Waits until the others have read of the fault: the store may end with this process."""
        deadline = self._system.now() + _ELECTION
        while self._system.now() < deadline:
            signs = [peer for rank, peer in self._beats.others().items() if rank != fault.stage]
            if all(sign.fault or sign.goodbye for sign in signs):
                return
            self._beats.hurry()
            self._system.sleep(_TICK / 4)

    def _is_elected(self, fault: Fault, told: bool) -> bool:
        try:
            self._beats.give(fault=fault)
            others = self._beats.others()
            lower = [rank for rank in others if rank < self._world.rank and rank != fault.stage]
            deadline = self._system.now() + (_ELECTION if lower and not told else 0.0)
            while not self._beats.is_claimed():
                if self._system.now() >= deadline:
                    return self._beats.claim()
                self._system.sleep(_TICK / 4)
            return False
        except dist.DistError:
            return self._is_lowest_here(fault)

    def _is_lowest_here(self, fault: Fault) -> bool:
        """Whether this is the lowest live stage of its machine. Without a store, that one tells the user."""
        now = self._system.now()
        alive = [rank for rank, at in self._near_at.items() if now - at < 2 * _ELECTION]
        return not any(rank < self._world.rank and rank != fault.stage for rank in alive)

    def _say(self, fault: Fault, *, aloud: bool) -> None:
        try:
            if self._on_fault and fault.stage != self._world.rank:
                self._on_fault(fault)
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            if aloud:
                self._system.write_error(f"error: {fault}\n")

    def _bounded(self, work: Callable[[], object], seconds: float) -> None:
        """Runs work that may block for ever, and goes on without it after some seconds."""
        self._system.start(work).join(seconds)
