"""A wire brings every byte, tells of its end, and is not shared with strangers."""

import json
import socket
import threading
from collections.abc import Iterator

import pytest
import torch
from mlora.cluster.processes import Process
from mlora.cluster.world import PeerError, World
from mlora.pipeline.wire import Wire, _token, connect
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from tests.mlora.stages import until


@pytest.fixture
def ends() -> Iterator[tuple[Wire, Wire]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = socket.create_connection(listener.getsockname())
        target, _ = listener.accept()
    wires = Wire(source), Wire(target)
    yield wires
    for wire in wires:
        wire.close()


def room(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def received(wire: Wire, *sizes: int) -> torch.Tensor:
    parts = [room(size) for size in sizes]
    wire.receive(parts)
    return torch.cat(parts)


def test_every_byte_arrives_in_order(ends: tuple[Wire, Wire]) -> None:
    """More than the system's buffers hold, in parts of odd sizes, one of them empty."""
    source, target = ends
    parts = [torch.randint(256, (size,), dtype=torch.uint8) for size in (5, 0, 10_000_001, 1, 3_000_000)]
    sender = threading.Thread(target=source.send, args=(parts,))
    sender.start()
    found = [
        received(target, 7),
        received(target, 999, 0, 12_998_999),
        received(target, 0),
        received(target, 2),
    ]
    sender.join(20)
    assert torch.equal(torch.cat(found), torch.cat(parts))


def test_more_parts_than_one_call_takes(ends: tuple[Wire, Wire]) -> None:
    source, target = ends
    source.send([torch.full((1,), index % 256, dtype=torch.uint8) for index in range(3000)])
    assert received(target, *[1] * 3000).tolist() == [index % 256 for index in range(3000)]


def test_closing_wakes_who_waits(ends: tuple[Wire, Wire]) -> None:
    _, target = ends
    found: list[BaseException] = []

    def wait() -> None:
        try:
            received(target, 1)
        except PeerError as error:
            found.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    target.close()
    waiting.join(20)
    assert len(found) == 1


def test_end_is_told(ends: tuple[Wire, Wire]) -> None:
    source, target = ends
    source.send([room(3)])
    source.close()
    with pytest.raises(PeerError, match="closed by the other end"):
        received(target, 4)
    target.close()
    with pytest.raises(PeerError):
        received(target, 1)
    with pytest.raises(PeerError):
        source.send([room(1)])


def world(rank: int, store: Store) -> World:
    return World(rank, 2, rank, store, Process.this())


class Meeting:
    """Process 1 waits for process 0, in a thread, and strangers come before."""

    def __init__(self, store: Store, timeout: float = 2.0) -> None:
        self.store, self.timeout = store, timeout
        self.found: dict[tuple[int, int], Wire] = {}
        self.error: PeerError | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.found = connect(world(1, self.store), [(0, 1)], self.timeout)
        except PeerError as error:
            self.error = error


def test_strangers_are_sent_away() -> None:
    store = PrefixStore("run", TCPStore("127.0.0.1", 0, is_master=True, use_libuv=False))
    meeting = Meeting(store)
    host, port = world(0, store).gather("wires", ["127.0.0.1", 1])[1]
    assert host == "127.0.0.1"
    strangers = [socket.create_connection((host, port)) for _ in range(4)]
    strangers[0].sendall(b"0" * 32 + bytes(8))  # not the token
    strangers[1].close()
    token = _token(world(0, store), 7, port)
    strangers[2].sendall(token + b"\x07" + bytes(7))  # nobody who is awaited; the last one says nothing
    with socket.create_connection((host, port)) as source:
        hello = _token(world(0, store), 0, port) + bytes(8)
        source.sendall(hello[:9])
        source.sendall(hello[9:] + b"x")
        meeting.thread.join(20)
        wire = meeting.found[0, 1]
        assert bytes(received(wire, 1).tolist()) == b"x"
    with pytest.raises(PeerError):
        received(wire, 1)
    wire.close()
    for stranger in strangers[::2]:
        assert stranger.recv(1) == b""
        stranger.close()


def test_many_strangers_keep_nobody_out() -> None:
    """More than wait at a listener; they come before process 0 does."""
    meeting = Meeting(store := HashStore(), 60.0)
    assert until(lambda: store.check(["wires/1"]))
    host, port = json.loads(world(0, store).values(["wires/1"])[0] or "")
    strangers = [socket.create_connection((host, port), 20) for _ in range(300)]
    wire = connect(world(0, store), [(0, 1)], 60.0)[0, 1]
    meeting.thread.join(60)
    wire.send([torch.tensor([7], dtype=torch.uint8)])
    assert received(meeting.found[0, 1], 1).tolist() == [7]
    for one in (*strangers, wire, meeting.found[0, 1]):
        one.close()


@pytest.mark.parametrize("comes", [False, True])
def test_process_that_does_not_come_is_named(comes: bool) -> None:
    store = HashStore()
    meeting = Meeting(store)
    if comes:
        world(0, store).gather("wires", ["", 1])
    meeting.thread.join(20)
    how = "connected in time" if comes else "come up within 2 s"
    assert str(meeting.error) == f"stage 0 has not {how}"


def test_process_that_cannot_be_reached_is_named() -> None:
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    meeting = threading.Thread(target=world(1, store).gather, args=("wires", ["127.0.0.1", port]))
    meeting.start()
    with pytest.raises(PeerError, match=f"stage 1 cannot be reached at 127.0.0.1:{port}: Connection refused"):
        connect(world(0, store), [(0, 1)], 2.0)
    meeting.join(20)
