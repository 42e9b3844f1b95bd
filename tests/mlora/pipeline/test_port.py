"""What one end of a port writes comes out of the other, whatever its size."""

import socket
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
from mlora.pipeline.message import Message, MessageType
from mlora.pipeline.port import _HEAD, WirePort
from mlora.pipeline.wire import Wire

LARGEST = _HEAD - 16 - len(b'["control", []]\n{"t":""}') + 2
"""Letters that fit into a head of the usual size, in the message of `test_headers`."""


@pytest.fixture
def ends() -> Iterator[tuple[WirePort, WirePort]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = socket.create_connection(listener.getsockname())
        target, _ = listener.accept()
    ports = WirePort(Wire(source), torch.device("cpu")), WirePort(Wire(target), torch.device("cpu"))
    yield ports
    for port in ports:
        port.close()


def test_credit_alone(ends: tuple[WirePort, WirePort]) -> None:
    ends[0].write(1 << 40, None)
    assert ends[1].read() == (1 << 40, None)
    assert ends[0].sent == _HEAD


@pytest.mark.parametrize("length", [0, 7, 1000, LARGEST - 2, LARGEST - 1, 3 * _HEAD])
def test_headers(length: int, ends: tuple[WirePort, WirePort]) -> None:
    ends[0].write(5, Message(MessageType.CONTROL, {"t": "x" * length}))
    credit, found = ends[1].read()
    assert found is not None
    assert (credit, found.sort, found.content) == (5, MessageType.CONTROL, {"t": "x" * length})
    assert ends[0].sent == _HEAD + max(0, length - LARGEST + 2)


@pytest.mark.parametrize("length", [1, 500, 5000])
def test_tensors(length: int, ends: tuple[WirePort, WirePort]) -> None:
    tensors = [
        torch.tensor(3.5, dtype=torch.float64),
        torch.arange(length, dtype=torch.int32)[::2],
        torch.zeros(0, 4),
        torch.randn(3, length).to(torch.bfloat16).T,
        torch.tensor([True, False, True]),
        torch.ones(2, requires_grad=True),
        torch.randn(3, dtype=torch.complex64).conj(),
    ]
    calls = Mock(side_effect=ends[1]._wire.receive)
    ends[1]._wire.receive = calls  # type: ignore[method-assign]
    ends[0].write(0, Message(MessageType.FORWARD, {"tensors": tensors, "number": 3}))
    _, again = ends[1].read()
    assert calls.call_count == 2, "each call may cost a wake-up"
    assert again is not None
    assert again.number == 3
    for expected, found in zip(tensors, again.content["tensors"], strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected.detach())
