"""Bytes between two processes, in one direction: a TCP connection.

A two-rank gloo group per direction does the same, but sends only after the receiver has told that it waits,
and works in a thread of its own: on the machine of docs/design.md a hop took 0.7 ms longer with it, and twice
the processor time.
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..cluster.world import PeerError, World, stages_have

_HELLO = struct.Struct("<32sq")  # the listener's secret, and the source's rank
_HELLO_SECONDS = 5.0
_MOST_PARTS = 1024  # of one call, limits.h: UIO_MAXIOV
# seconds: a neighbour's machine that is gone without a word, or a way that forgets idle connections. There is
# no TCP_USER_TIMEOUT: it would end connections of a run that is suspended for that long, too
_KEEPING = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


class Wire:
    """One end. One thread at its source sends, one at its target receives.

    Args:
        connection: this end's.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPING.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection = connection

    def send(self, parts: Sequence[Tensor]) -> None:
        """Send bytes; returns when the system has taken them.

        Args:
            parts: `[n]` uint8 each, contiguous, of the host.

        Raises:
            PeerError: if the connection broke.
        """
        views = [memoryview(part.numpy().data) for part in parts]
        while views:
            count = _done(self._connection.sendmsg, views[:_MOST_PARTS])
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]

    def receive(self, into: Tensor) -> Tensor:
        """Wait for as many bytes as there is room for.

        Args:
            into: `[n]` uint8, contiguous, of the host.

        Returns:
            The same.

        Raises:
            PeerError: if the connection broke.
        """
        room = memoryview(into.numpy().data)
        while room:
            count = _done(self._connection.recv_into, room)
            if not count:
                raise PeerError("closed by the other end")
            room = room[count:]
        return into

    def close(self) -> None:
        """End the connection; the other end reads what was sent, and then its end. So does a thread here."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _done(operation: Callable[[Any], int], data: Any) -> int:
    try:
        return operation(data)
    except OSError as error:
        raise PeerError(error.strerror or str(error)) from error


def connect(world: World, pairs: Sequence[tuple[int, int]], timeout: float) -> dict[tuple[int, int], Wire]:
    """Connect processes; all of them call it once.

    Each waits for its sources at a port of its own, which the world's store tells of with a secret that a
    source has to know.

    Args:
        world: the processes.
        pairs: `(source, target)`: their ranks. Those that this process is not in are of no account.
        timeout: seconds in which all processes have to come, and then again to connect.

    Returns:
        This process's end of each of its pairs.

    Raises:
        PeerError: if another process cannot be reached, or does not come.
        RuntimeError: if this one cannot listen.
    """
    host, everywhere = _own_address(world.store)
    secret = secrets.token_hex(16)
    with closing(_listener("" if everywhere else host)) as listener:
        port = listener.getsockname()[1]
        # one that is known by the store's name only is where the store is
        addresses = world.gather("wires", ["" if everywhere else host, port, secret], timeout)
        deadline = time.monotonic() + timeout
        wires = {
            (world.rank, target): _call(world, target, addresses[target], deadline)
            for source, target in pairs
            if source == world.rank
        }
        awaited = {source for source, target in pairs if target == world.rank}
        wires |= _awaited(listener, world.rank, awaited, secret, deadline)
    return wires


def _call(world: World, target: int, address: Sequence[object], deadline: float) -> Wire:
    host, port, secret = address
    place = (str(host) or _store_host(world.store), int(str(port)))
    try:
        connection = socket.create_connection(place, max(0.1, deadline - time.monotonic()))
        connection.sendall(_HELLO.pack(str(secret).encode(), world.rank))
    except OSError as error:
        reason = error.strerror or error
        raise PeerError(f"stage {target} cannot be reached at {place[0]}:{place[1]}: {reason}") from error
    return Wire(connection)


def _awaited(
    listener: socket.socket, own: int, sources: set[int], secret: str, deadline: float
) -> dict[tuple[int, int], Wire]:
    wires: dict[tuple[int, int], Wire] = {}
    while sources:
        listener.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if not isinstance(error, TimeoutError):
                raise RuntimeError(f"stage {own} cannot be reached: {error.strerror or error}") from error
            raise PeerError(f"{stages_have(sorted(sources))} not connected in time") from error
        source = _greeted(connection, secret)
        if source in sources:
            sources = sources - {source}
            wires[source, own] = Wire(connection)
        else:
            connection.close()
    return wires


def _greeted(connection: socket.socket, secret: str) -> int:
    """Who has called, or -1 for one that does not know the secret."""
    hello, deadline = bytearray(), time.monotonic() + _HELLO_SECONDS
    try:
        while len(hello) < _HELLO.size:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            more = connection.recv(_HELLO.size - len(hello))
            if not more:
                return -1
            hello += more
    except OSError:
        return -1
    told, source = _HELLO.unpack(hello)
    return source if secrets.compare_digest(told, secret.encode()) else -1


def _own_address(store: dist.Store) -> tuple[str, bool]:
    """This process's address on the way to the store, and whether it has to listen at all of them.

    A machine may know its own name as one of its loopback addresses, which others cannot call.
    """
    host = _store_host(store)
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise RuntimeError(f"no way to the launcher's store at {host}: {error.strerror or error}") from error
    is_local = own.startswith("127.") or own == "::1"
    return own, is_local and host not in (own, "localhost")


def _store_host(store: dist.Store) -> str:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else "localhost"


def _listener(host: str) -> socket.socket:
    """A port of its own at an address, or at all of them."""
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise RuntimeError(f"cannot listen at {host or 'any address'}: {error.strerror or error}") from error
