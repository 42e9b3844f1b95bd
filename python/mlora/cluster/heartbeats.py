"""Heartbeats: the signs of life that each process of a pipeline gives and reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .processes import Process, System
from .world import World

_JOIN = 2.0  # seconds
_CLAIM = "told"
_TRIES = 10


@dataclass(frozen=True)
class Fault:
    """What is wrong with a stage."""

    stage: int
    host: str  # its machine; empty if the stage never gave a sign of life
    pid: int
    message: str  # what the stage no longer does; if `own`, its own words
    own: bool = False  # the stage reported the fault itself

    def __str__(self) -> str:
        """Returns the line for the user."""
        who = f"stage {self.stage} ({self.host}, pid {self.pid})" if self.host else f"stage {self.stage}"
        return f"{who}{':' if self.own else ''} {self.message}"


@dataclass(frozen=True)
class Sign:
    """What a process tells the others each time."""

    process: Process
    number: int = 0  # counts the signs
    busy: float = 0.0  # seconds at the same piece of work
    in_flight: str = ""  # the adapters that it is working on
    goodbye: bool = False  # it has done its work; its silence from now on is no fault
    fault: Fault | None = None  # what it found, in itself or in another stage, before it ends

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Sign:
        values: dict[str, Any] = json.loads(text)
        fault = Fault(**values.pop("fault")) if values["fault"] else values.pop("fault")
        return cls(process=Process(**values.pop("process")), fault=fault, **values)


@dataclass
class Beats:
    """Gives and reads the signs, in its own thread and on its own connections to the store."""

    world: World
    describe: Callable[[], str]  # returns the adapters in flight; called in the thread
    work: Callable[[], int]  # returns the number of the current piece of work, 0 = none; called in the thread
    timeout: float  # seconds in which the store has to answer
    interval: float  # seconds from one sign to the next
    system: System = field(default_factory=System)  # the clock and the threads
    # the last signs of the other processes, by rank
    seen: dict[int, Sign] = field(default_factory=dict, init=False)
    silence: dict[int, float] = field(default_factory=dict, init=False)  # seconds since their last signs
    rounds: int = field(default=0, init=False)  # how often the thread has read all of them
    lost: bool = field(default=False, init=False)  # the store has closed its connection

    def __post_init__(self) -> None:
        self.sign = Sign(self.world.process)
        self._piece = 0
        self._lock = self.system.rlock()
        self._awake, self._stopped = self.system.event(), False
        store: Any = self.world.store  # torch's stubs lack `clone`
        self._store = store.clone()
        self._reading = store.clone()  # a frozen store may block this one for ever
        self._reading.set_timeout(timedelta(seconds=self.timeout))
        self._read_at = self.system.now()
        self.give()
        self.thread = self.system.start(self._run, "mlora-beats")

    def give(self, **changes: Any) -> None:
        """Gives a sign now; `changes` of the fields of `Sign` hold from now on."""
        with self._lock:
            self.sign = replace(self.sign, number=self.sign.number + 1, **changes)
            key = _key(self.world.rank)
            self._store.set(key, self.world.sealed(key, self.sign.to_json()))

    def others(self) -> dict[int, Sign]:
        """Returns a copy of what is seen now."""
        return dict(self.seen)

    def hurry(self) -> None:
        """Gives and reads the next signs at once."""
        self._awake.set()

    def stop(self) -> None:
        """Ends the thread, which must not outlive Python; a frozen store may prevent it."""
        self._stopped = True
        self.hurry()
        self.thread.join(_JOIN)

    def claim(self) -> bool:
        """Claims the right to tell the user of a fault; only the first process that asks gets it."""
        mine, before = self.world.sealed(_CLAIM, str(self.world.rank)), ""
        for _ in range(_TRIES):
            found = self._store.compare_set(_CLAIM, before, mine)
            if self.world.opened(_CLAIM, found) is not None:
                return bool(found == mine.encode())
            before = found  # a stranger's
        return True  # one line too many is better than none

    def is_claimed(self) -> bool:
        """Whether a process has claimed that right."""
        held = self._store.multi_get([_CLAIM]) if self._store.check([_CLAIM]) else []
        return any(self.world.opened(_CLAIM, found) is not None for found in held)

    def _run(self) -> None:
        try:
            while not self._stopped:
                now = self.system.now()
                # this process may have been held up or suspended: then it neither worked nor looked
                since, self._read_at = min(now - self._read_at, 2 * self.interval), now
                self.give(in_flight=self.describe(), busy=self._busy(since))
                self.world.publish_again(self._store)
                self._read(since)
                self.rounds += 1
                met = len(self.seen) == self.world.size - 1
                self._awake.wait(self.interval if met else self.interval / 10)
                self._awake.clear()
        except dist.DistError:
            self.lost = True

    def _busy(self, since: float) -> float:
        before, self._piece = self._piece, self.work()
        return self.sign.busy + since if self._piece and self._piece == before else 0.0

    def _read(self, since: float) -> None:
        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        present = [rank for rank in others if rank in self.seen or self._reading.check([_key(rank)])]
        held = self._reading.multi_get([_key(rank) for rank in present]) if present else []
        for rank, found in zip(present, held, strict=True):
            text, before = self.world.opened(_key(rank), found), self.seen.get(rank)
            sign = None if text is None else Sign.from_json(text)
            # a stranger can write an earlier sign once more
            if sign is not None and (before is None or sign.number > before.number):
                self.silence[rank], self.seen[rank] = 0.0, sign
            elif before is not None:
                self.silence[rank] += since


def _key(rank: int) -> str:
    return f"beats/{rank}"
