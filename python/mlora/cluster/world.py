"""What a process knows of the pipeline's other processes, and the facts that all have to agree on."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .processes import Process

SECRET = "MLORA_RUN_SECRET"
"""The variable in which a launcher gives the processes of a run their secret."""
_LOOK_AGAIN = 0.1  # seconds
_FIRST = 300.0  # seconds for rank 0 to come up, where no launcher gives a secret
_TAG = 64  # hexadecimal digits before each value: HMAC-SHA256


class PeerError(RuntimeError):
    """Another process of the pipeline is at fault. That process, or the lowest live one, tells the user."""


@dataclass(frozen=True)
class World:
    """The processes of a run, one per stage of each replica, as one of them knows them.

    Whoever reaches the store's port can write there. So each value carries a tag, HMAC-SHA256 with the run's
    secret over key and value. A value without the right tag counts as absent, and its owner writes it again
    with each sign of life.
    """

    rank: int  # this process's number among all of them. Messages call it the stage.
    size: int  # number of processes
    local_rank: int  # its number among those that its launcher started on this machine, which is its GPU
    store: dist.Store  # reaches all processes
    process: Process  # this one
    secret: bytes = field(default=b"", repr=False)  # only the processes of this run know it
    _own: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def from_launcher(cls, timeout: float = 60.0) -> World | None:
        """Returns this process's world as its launcher describes it, or None if no launcher started it.

        The launcher's contract is that of `torchrun`, which torch reads. `TORCHELASTIC_RUN_ID` says that
        there is a launcher. `RANK`, `WORLD_SIZE` and `LOCAL_RANK` count. `MASTER_ADDR` and `MASTER_PORT` name
        the store. The launcher holds the store if `TORCHELASTIC_USE_AGENT_STORE` is `True`, and otherwise the
        process of rank 0 does. The store has `timeout` seconds to answer. `MLORA_RUN_SECRET` is the run's
        secret. Without it, as under `torchrun`, rank 0 draws one, and the store holds it until all processes
        have come to `agree`.

        Raises:
            ValueError: the store cannot be reached, rank 0 does not come, or the contract is broken.
        """
        if not dist.is_torchelastic_launched():
            return None
        try:
            store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        except dist.DistError as error:
            reason = str(error).splitlines()[0].removesuffix(".")
            raise ValueError(f"the launcher's store cannot be reached: {reason}") from error
        store = dist.PrefixStore("mlora", store)
        secret = os.environ.get(SECRET) or _drawn_secret(store, rank)
        return cls(rank, size, dist.get_node_local_rank(), store, Process.this(), secret.encode())

    def token(self, text: str) -> bytes:
        """Returns 32 bytes that only a process of this run can compute from `text`."""
        return hmac.digest(self.secret, text.encode(), hashlib.sha256)

    def sealed(self, key: str, value: str) -> str:
        """Returns a value as the store holds it under `key`: after its tag."""
        return self.token(f"{key}\n{value}").hex() + value

    def opened(self, key: str, held: bytes) -> str | None:
        """Returns a value that the store holds under `key`; None if no process of this run wrote it."""
        text = held.decode(errors="replace")
        value = text[_TAG:]
        return value if hmac.compare_digest(self.sealed(key, value).encode(), held) else None

    def publish(self, key: str, value: str) -> None:
        """Writes a value for the other processes."""
        self._own[key] = self.sealed(key, value)
        self.store.set(key, self._own[key])

    def publish_again(self, store: dist.Store) -> None:
        """Writes all values of `publish` once more, through another connection to the store."""
        for key, held in list(self._own.items()):
            store.set(key, held)

    def values(self, keys: Sequence[str]) -> list[str | None]:
        """Returns the values of these keys; None for those that no process of this run has written."""
        here = keys if self.store.check(list(keys)) else [key for key in keys if self.store.check([key])]
        held = dict(zip(here, self.store.multi_get(list(here)) if here else [], strict=True))
        return [self.opened(key, held[key]) if key in held else None for key in keys]

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
        if self.rank == 0:
            self.store.delete_key(SECRET)
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
        keys = [f"{topic}/{rank}" for rank in range(self.size)]
        self.publish(keys[self.rank], json.dumps(value))
        while None in (found := self.values(keys)):
            if time.monotonic() > deadline:
                return [], [rank for rank, one in enumerate(found) if one is None]
            time.sleep(_LOOK_AGAIN)
        for earlier in self._own.keys() - {keys[self.rank]}:  # all who are here have read those
            del self._own[earlier]
        return [json.loads(one) for one in found if one is not None], []

    def _all_have_read(self, deadline: float) -> None:
        """Waits for the readers: the store may be in the process of rank 0, which therefore leaves last."""
        self.publish(f"facts/read/{self.rank}", "")
        keys = [f"facts/read/{rank}" for rank in range(self.size)]
        while self.rank == 0 and None in self.values(keys) and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN)

    def _error(self, rank: int, line: str) -> Exception:
        return ValueError(line) if rank == self.rank else PeerError(line)


def _drawn_secret(store: dist.Store, rank: int) -> str:
    """Returns the secret that rank 0 draws, where the launcher gives none."""
    if rank == 0:  # another value there is a stranger's, and the others do not come up
        store.set(SECRET, drawn := secrets.token_hex(32))
        return drawn
    try:
        store.wait([SECRET], timedelta(seconds=_FIRST))
    except dist.DistStoreError as error:
        raise ValueError(f"stage 0 has not come up within {_FIRST:g} s") from error
    return store.get(SECRET).decode()


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
