"""Messages survive the way to the neighbour."""

import math

import pytest
import torch
from mlora.optim.step_rule import Update
from mlora.pipeline import ModuleCall
from mlora.pipeline.message import Message, MessageType, decode


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
