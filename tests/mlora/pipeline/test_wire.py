"""Wires, ports, links and messages: every byte arrives, an end is told, and strangers are not let in."""

import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
from mlora.cluster.processes import Process
from mlora.cluster.world import PeerError, World
from mlora.optim.step_rule import Update
from mlora.pipeline import ModuleCall, Pipeline
from mlora.pipeline.link import Link
from mlora.pipeline.message import Message, MessageType, decode
from mlora.pipeline.port import _HEAD, LocalPort, WirePort
from mlora.pipeline.wire import Wire, _token, connect
from torch import nn
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


LARGEST = _HEAD - 16 - len(b'["control", []]\n{"t":""}') + 2
"""Letters that fit into a head of the usual size, in the message of `test_headers`."""


@pytest.fixture
def port_ends() -> Iterator[tuple[WirePort, WirePort]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = socket.create_connection(listener.getsockname())
        target, _ = listener.accept()
    ports = WirePort(Wire(source), torch.device("cpu")), WirePort(Wire(target), torch.device("cpu"))
    yield ports
    for port in ports:
        port.close()


def test_credit_alone(port_ends: tuple[WirePort, WirePort]) -> None:
    port_ends[0].write(1 << 40, None)
    assert port_ends[1].read() == (1 << 40, None)
    assert port_ends[0].sent == _HEAD


@pytest.mark.parametrize("length", [0, 7, 1000, LARGEST - 2, LARGEST - 1, 3 * _HEAD])
def test_headers(length: int, port_ends: tuple[WirePort, WirePort]) -> None:
    port_ends[0].write(5, Message(MessageType.CONTROL, {"t": "x" * length}))
    credit, found = port_ends[1].read()
    assert found is not None
    assert (credit, found.sort, found.content) == (5, MessageType.CONTROL, {"t": "x" * length})
    assert port_ends[0].sent == _HEAD + max(0, length - LARGEST + 2)


@pytest.mark.parametrize("length", [1, 500, 5000])
def test_tensors(length: int, port_ends: tuple[WirePort, WirePort]) -> None:
    tensors = [
        torch.tensor(3.5, dtype=torch.float64),
        torch.arange(length, dtype=torch.int32)[::2],
        torch.zeros(0, 4),
        torch.randn(3, length).to(torch.bfloat16).T,
        torch.tensor([True, False, True]),
        torch.ones(2, requires_grad=True),
        torch.randn(3, dtype=torch.complex64).conj(),
    ]
    calls = Mock(side_effect=port_ends[1]._wire.receive)
    port_ends[1]._wire.receive = calls  # type: ignore[method-assign]
    port_ends[0].write(0, Message(MessageType.FORWARD, {"tensors": tensors, "number": 3}))
    _, again = port_ends[1].read()
    assert calls.call_count == 2, "each call may cost a wake-up"
    assert again is not None
    assert again.number == 3
    for expected, found in zip(tensors, again.content["tensors"], strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected.detach())


SECONDS = 20.0


class Joined:
    """Both ends of a link between two stages, and what arrives at each."""

    def __init__(self, *, credit_bytes: int = 1 << 20) -> None:
        ports = [LocalPort(torch.device("cpu")) for _ in range(2)]
        self.ports = ports
        self.found: list[list[Message]] = [[], []]
        self.ends = [
            Link(ports[k], ports[1 - k], self.found[k].append, f"stage {1 - k}", credit_bytes=credit_bytes)
            for k in range(2)
        ]

    def start(self) -> None:
        for end in self.ends:
            end.start()

    def join(self) -> None:
        for end in self.ends:
            end.join(SECONDS)
            assert not any(thread.is_alive() for thread in end._threads)


def fails(*_: object) -> None:
    raise OSError("no room")


@pytest.mark.parametrize("side", ["write", "read"])
def test_an_error_ends_both_ends_and_is_told_first(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = Joined()
    monkeypatch.setattr(joined.ports[0], side, fails)  # of end 0's sender, or of end 1's receiver
    joined.start()
    joined.ends[0].send(Message(MessageType.FORWARD, {"number": 1}))
    failed = 0 if side == "write" else 1
    deadline = time.monotonic() + SECONDS
    while not joined.found[failed] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert joined.found[failed][0].content["message"] == f"lost the connection to stage {1 - failed}: no room"
    for end in joined.ends:  # as stages do that are told
        end.send(Message(MessageType.FAULT, {"message": "told"}))
    joined.join()
    assert joined.found[1 - failed][-1].sort is MessageType.FAULT


def test_credit_is_not_waited_for_after_the_end() -> None:
    """The neighbour's sender ends with `END`; what waits here for its credit still goes, and its end."""
    joined = Joined(credit_bytes=1)
    joined.start()
    for number in range(3):
        joined.ends[0].send(Message(MessageType.BACKWARD, {"number": number, "gradients": [torch.ones(9)]}))
    joined.ends[1].send(Message(MessageType.END))
    joined.ends[0].send(Message(MessageType.END))
    joined.join()
    assert [message.number for message in joined.found[1]] == [0, 1, 2, -1]


def test_a_pipeline_closes_while_batches_are_under_way() -> None:
    before = set(threading.enumerate())
    stages = [nn.Linear(4, 4) for _ in range(3)]
    pipeline = Pipeline(stages, "lorapp", lambda y, _: (y.sum(), None), credit_bytes=1)
    for _ in range(6):
        pipeline.start(ModuleCall({"input": torch.ones(2, 4)}, None))
    pipeline.close()
    assert set(threading.enumerate()) <= before


def test_content_comes_back() -> None:
    tensors = [torch.randn(3, 2), torch.arange(4, dtype=torch.int32), torch.zeros(0, 5, dtype=torch.bfloat16)]
    content = {
        "number": 7,
        "none": None,
        "real": 0.1 + 0.2,
        "endless": math.inf,
        "text": "a\nb",
        "nested": {"a": [1, True, {"b": tensors[1]}], "x": tensors[0]},
        "empty": tensors[2],
        "call": ModuleCall({"x": tensors[1]}, None, {"a": [Update(0.5, taken=True)]}),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }
    sent = Message(MessageType.FORWARD, content)

    def receive(expected: list[tuple[list[int], torch.dtype, bool]]) -> list[torch.Tensor]:
        assert expected == [(list(t.shape), t.dtype, False) for t in sent.tensors]
        return sent.tensors

    message = decode(sent.encode(), receive)
    assert message.sort is MessageType.FORWARD
    assert message.number == 7
    assert message.size == 3 * 2 * 4 + 2 * 4 * 4 + 8
    for key in ("none", "real", "endless", "text"):
        assert message.content[key] == content[key]
    assert message.content["nested"]["a"][:2] == [1, True]
    assert message.content["nested"]["a"][2]["b"] is tensors[1]
    assert message.content["nested"]["x"] is tensors[0]
    assert message.content["empty"].shape == (0, 5)
    call = message.content["call"]
    assert (type(call), call.targets, call.common) == (ModuleCall, None, {"a": [Update(0.5, taken=True)]})
    assert call.inputs["x"] is tensors[1]


@pytest.mark.parametrize("content", [{"a": object()}, {"a": {1, 2}}, {"a": [3 + 1j]}])
def test_what_is_not_plain_is_refused(content: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="message: expected"):
        Message(MessageType.CONTROL, content).encode()


@pytest.mark.parametrize(
    "content", [{1: "a"}, {"a": [{None: 2}]}, {"a": ({"mlora.tensor": 0},)}, {"mlora.record": ""}]
)
def test_a_key_that_would_arrive_as_another_is_refused(content: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="message: expected text keys"):
        Message(MessageType.CONTROL, content).encode()
