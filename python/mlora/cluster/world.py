"""What a process knows of the pipeline's other processes, and the facts that all have to agree on."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .processes import Process

_LOOK_AGAIN = 0.1  # seconds


class PeerError(RuntimeError):
    """Another process of the pipeline is at fault. That process, or the lowest live one, tells the user."""


@dataclass(frozen=True)
class World:
    """The processes of a run, one per stage of each replica, as one of them knows them."""

    rank: int  # this process's number among all of them. Messages call it the stage.
    size: int  # number of processes
    local_rank: int  # its number among those that its launcher started on this machine, which is its GPU
    store: dist.Store  # reaches all processes
    process: Process  # this one

    @classmethod
    def from_launcher(cls, timeout: float = 60.0) -> World | None:
        """Returns this process's world as its launcher describes it, or None if no launcher started it.

        The launcher's contract is that of `torchrun`, which torch reads. `TORCHELASTIC_RUN_ID` says that
        there is a launcher. `RANK`, `WORLD_SIZE` and `LOCAL_RANK` count. `MASTER_ADDR` and `MASTER_PORT` name
        the store. The launcher holds the store if `TORCHELASTIC_USE_AGENT_STORE` is `True`, and otherwise the
        process of rank 0 does. The store has `timeout` seconds to answer.

        Raises:
            ValueError: the store cannot be reached, or the contract is broken.
        """
        if not dist.is_torchelastic_launched():
            return None
        try:
            store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        except dist.DistError as error:
            reason = str(error).splitlines()[0].removesuffix(".")
            raise ValueError(f"the launcher's store cannot be reached: {reason}") from error
        return cls(rank, size, dist.get_node_local_rank(), dist.PrefixStore("mlora", store), Process.this())

    def agree(self, facts: Mapping[str, Any], timeout: float = 300.0) -> None:
        """Waits for every process, and checks that all hold the same facts as rank 0.

        Args:
            facts: JSON values, nested as one likes.
            timeout: seconds in which every process has to come here.

        Raises:
            ValueError: this process differs, or some are missing and this is the lowest rank present. The
                message is the line for the user.
            PeerError: another process raises that ValueError.
        """
        deadline = time.monotonic() + timeout
        entries, missing = self._collect("facts", {"process": asdict(self.process), "facts": facts}, timeout)
        if missing:
            first = min(set(range(self.size)) - set(missing))
            raise self._error(first, f"{stages_have(missing)} not come up within {timeout:g} s")
        self._all_have_read(deadline)
        for rank in range(1, self.size):
            difference = _difference(entries, rank)
            if difference:
                raise self._error(rank, difference)

    def gather(self, topic: str, value: Any, timeout: float = math.inf) -> list[Any]:
        """Waits for a JSON value of every process, and returns all by rank. Each topic may be gathered once.
        Without a limit, `Watch` ends the wait if a process is dead. PeerError if some have not come."""
        found, missing = self._collect(topic, value, timeout)
        if missing:
            raise PeerError(f"{stages_have(missing)} not come up within {timeout:g} s")
        return found

    def _collect(self, topic: str, value: Any, timeout: float) -> tuple[list[Any], list[int]]:
        """Returns the values of all processes, or the ranks of those that have not come in time."""
        deadline = time.monotonic() + timeout
        self.store.set(f"{topic}/{self.rank}", json.dumps(value))
        keys = [f"{topic}/{rank}" for rank in range(self.size)]
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                return [], [rank for rank in range(self.size) if not self.store.check([keys[rank]])]
            time.sleep(_LOOK_AGAIN)
        return [json.loads(found) for found in self.store.multi_get(keys)], []

    def _all_have_read(self, deadline: float) -> None:
        """Counts the readers. The store may be in the process of rank 0, which therefore leaves last."""
        key = "facts/read"
        read = self.store.add(key, 1)
        while self.rank == 0 and read < self.size and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN)
            read = self.store.add(key, 0)

    def _error(self, rank: int, line: str) -> Exception:
        return ValueError(line) if rank == self.rank else PeerError(line)


def stages_have(ranks: Sequence[int]) -> str:
    """`stage 1 has`, or `stages 1, 2 have`."""
    names = ", ".join(map(str, ranks))
    return f"stage {names} has" if len(ranks) == 1 else f"stages {names} have"


def _difference(entries: Sequence[Mapping[str, Any]], rank: int) -> str:
    """Returns the line that names the first fact in which a process differs from rank 0; empty if none."""
    mine, first = (dict(_flat("", entries[r]["facts"])) for r in (rank, 0))
    for key in [*first, *(key for key in mine if key not in first)]:
        if mine.get(key) != first.get(key):
            held = [json.loads(facts[key]) if key in facts else "nothing" for facts in (mine, first)]
            return (
                f"{_who(entries, rank)} has {key} {held[0]}, {_who(entries, 0)} has {held[1]}; "
                "all stages need the same"
            )
    return ""


def _who(entries: Sequence[Mapping[str, Any]], rank: int) -> str:
    process = entries[rank]["process"]
    return f"stage {rank} (host {process['host']}, pid {process['pid']})"


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}" if path else key, inner)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _flat(f"{path}[{index}]", inner)
    else:
        yield path, json.dumps(value)
