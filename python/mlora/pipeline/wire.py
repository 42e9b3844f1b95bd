"""Bytes between two processes, in one direction: a TCP connection.

A gloo group of two ranks per direction does the same, but it sends only after the receiver has said that it
waits, and it works in its own thread. On the machine of docs/design.md a hop with gloo took 0.7 ms longer,
and twice the processor time.
"""

from __future__ import annotations

import errno
import hmac
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import islice
from threading import Event

import torch.distributed as dist
from torch import Tensor

from ..cluster.world import PeerError, World, stages_have

_HELLO = struct.Struct("<32sq")  # the wire's token, and the source's rank
_HELLO_SECONDS = 5.0
_LOOK_AGAIN = 0.1  # seconds
_MOST_CALLERS = 64  # that have not said who they are
_MOST_PARTS = 1024  # of one call, limits.h: UIO_MAXIOV
# seconds; notices a neighbour's machine that vanished, and keeps idle connections open in the network.
# No TCP_USER_TIMEOUT: it would also end the connections of a run that is suspended for that long
_KEEPING = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


class Wire:
    """One end of a connection. One thread at the source sends, one at the target receives.
    `send` and `receive` raise PeerError if the connection broke."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPING.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection = connection

    def send(self, parts: Sequence[Tensor]) -> None:
        """Sends contiguous `[n]` uint8 tensors of the host; returns when the system has taken them."""
        self._move(self._connection.sendmsg, parts)

    def receive(self, parts: Sequence[Tensor]) -> None:
        """Fills contiguous `[n]` uint8 tensors of the host, waiting for all of their bytes."""
        self._move(lambda views: self._connection.recvmsg_into(views)[0], parts)

    def _move(self, operation: Callable[[list[memoryview]], int], parts: Sequence[Tensor]) -> None:
        views = deque(memoryview(part.numpy().data) for part in parts if part.nbytes)
        while views:
            try:
                count = operation(list(islice(views, _MOST_PARTS)))
            except OSError as error:
                raise PeerError(error.strerror or str(error)) from error
            if not count:
                raise PeerError("closed by the other end")
            while views and count >= len(views[0]):
                count -= len(views.popleft())
            if count:
                views[0] = views[0][count:]

    def close(self) -> None:
        """Closes the connection. The other end, and a thread here, read what was sent and then the end."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def connect(world: World, pairs: Sequence[tuple[int, int]], timeout: float) -> dict[tuple[int, int], Wire]:
    """Connects processes and returns this one's end of each of its `(source, target)` pairs of ranks.

    All processes call it once. Each waits for its sources at its own port, which it publishes in the world's
    store. A source has to send a token that only processes of this run can compute. All processes have
    `timeout` seconds to come, and as many again to connect.

    Raises:
        PeerError: another process cannot be reached, or does not come.
        RuntimeError: this process cannot listen.
    """
    host, everywhere = _own_address(world.store)
    awaited = {source for source, target in pairs if target == world.rank}
    with closing(_listener("" if everywhere else host)) as listener, ThreadPoolExecutor(1) as thread:
        port, given_up = listener.getsockname()[1], Event()
        # it hears callers from the start: strangers could fill the queue of those that wait
        heard = thread.submit(_awaited, world, listener, awaited, time.monotonic() + 2 * timeout, given_up)
        try:
            # "": its own address is loopback only, so others call it by the store's host name
            addresses = world.gather("wires", ["" if everywhere else host, port], timeout)
            deadline = time.monotonic() + timeout
            wires = {
                (world.rank, target): _call(world, target, addresses[target], deadline)
                for source, target in pairs
                if source == world.rank
            }
            return wires | heard.result()
        finally:
            given_up.set()


def _call(world: World, target: int, address: Sequence[object], deadline: float) -> Wire:
    host, port = address
    place = (str(host) or _store_host(world.store), int(str(port)))
    try:
        connection = socket.create_connection(place, max(0.1, deadline - time.monotonic()))
        connection.sendall(_HELLO.pack(_token(world, world.rank, place[1]), world.rank))
    except OSError as error:
        reason = error.strerror or error
        raise PeerError(f"stage {target} cannot be reached at {place[0]}:{place[1]}: {reason}") from error
    return Wire(connection)


def _awaited(
    world: World, listener: socket.socket, sources: set[int], deadline: float, given_up: Event
) -> dict[tuple[int, int], Wire]:
    wires: dict[tuple[int, int], Wire] = {}
    port = listener.getsockname()[1]
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while sources and not given_up.is_set():
                if time.monotonic() > deadline:
                    raise PeerError(f"{stages_have(sorted(sources))} not connected in time")
                for connection, hello in _heard(selector, listener, world.rank):
                    source = _source_of(world, hello, port)
                    if source in sources:
                        sources = sources - {source}
                        wires[source, world.rank] = Wire(connection)
                    else:
                        connection.close()
        finally:
            for key in list(selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket) and key.fileobj is not listener:
                    key.fileobj.close()
    return wires


def _heard(
    selector: selectors.BaseSelector, listener: socket.socket, own: int
) -> Iterator[tuple[socket.socket, bytes]]:
    """Yields callers with what they have said: all of it, or too little after some seconds.
    All are listened to side by side, so that none holds up another. Of too many, the oldest have to go."""
    selector.select(_LOOK_AGAIN)
    now = time.monotonic()
    for caller in _accepted(listener, own):
        selector.register(caller, selectors.EVENT_READ, (bytearray(), now + _HELLO_SECONDS))
    keys = list(selector.get_map().values())  # in the order in which they came; the listener is the first
    for place, key in enumerate(keys):
        connection = key.fileobj
        if connection is listener or not isinstance(connection, socket.socket):
            continue
        hello, until = key.data
        try:
            more = connection.recv(_HELLO.size - len(hello))
            hello += more
            ended = not more or len(hello) == _HELLO.size
        except BlockingIOError:
            ended = False
        except OSError:
            ended = True
        if ended or now > until or len(keys) - place > _MOST_CALLERS:
            selector.unregister(connection)
            yield connection, bytes(hello)


def _accepted(listener: socket.socket, own: int) -> Iterator[socket.socket]:
    """Yields connections that wait at a listener, in non-blocking mode; not too many at once."""
    for _ in range(_MOST_CALLERS):
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # those that are heard now make room
                return
            raise RuntimeError(f"stage {own} cannot accept connections: {error.strerror or error}") from error
        connection.setblocking(False)
        yield connection


def _source_of(world: World, hello: bytes, port: int) -> int:
    """Returns the rank of the process that said `hello`; -1 if it is not one of this run."""
    if len(hello) < _HELLO.size:
        return -1
    told, source = _HELLO.unpack(hello)
    return source if hmac.compare_digest(told, _token(world, source, port)) else -1


def _token(world: World, source: int, port: int) -> bytes:
    """Returns what `source` has to send first to the process that listens at `port`."""
    return world.token(f"wire of {source} to port {port}")


def _own_address(store: dist.Store) -> tuple[str, bool]:
    """Returns this process's address towards the store, and whether it has to listen at all addresses.
    A machine may know its own name as one of its loopback addresses, which others cannot call."""
    host = _store_host(store)
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise RuntimeError(
            f"cannot reach the launcher's store at {host}: {error.strerror or error}"
        ) from error
    is_local = own.startswith("127.") or own == "::1"
    return own, is_local and host not in (own, "localhost")


def _store_host(store: dist.Store) -> str:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else "localhost"


def _listener(host: str) -> socket.socket:
    """Listens at a free port of an address, or of all addresses if `host` is empty."""
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise RuntimeError(f"cannot listen at {host or 'any address'}: {error.strerror or error}") from error
