"""A link ends at both ends, whatever breaks, and closing waits for nothing that does not come."""

import threading
import time

import pytest
import torch
from mlora.pipeline import ModuleCall, Pipeline
from mlora.pipeline.link import Link
from mlora.pipeline.message import Message, MessageType
from mlora.pipeline.port import LocalPort
from torch import nn

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
