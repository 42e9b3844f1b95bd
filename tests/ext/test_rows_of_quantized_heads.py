"""Trained rows of a quantised head or embedding are refused in one line, whichever library made it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from head_models import lora
from test_start_from_weights import Rounded
from torch import Tensor, nn

import mlora_ext as mx

MESSAGE = r"^adapter 'a': trainable_token_indices: {} is a {} with quantised or sharded weights, whose rows"


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(70, 64), nn.Linear(64, 64), nn.Linear(64, 70)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(input_ids))))


class TorchLinear(nn.Module):
    """Has the name, buffers and sizes of gptqmodel's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = 64, 70, None
        self.register_buffer("qweight", torch.zeros(8, 70, dtype=torch.int32))


TorchLinear.__module__, TorchLinear.__name__ = "gptqmodel.nn_modules.qlinear.torch", "BaseQuantLinear"


def check_refused(model: nn.Module, target: str, kind: str) -> None:
    before = [type(module) for module in model.modules()]
    config = lora(target_modules=["body"], trainable_token_indices={target: [3, 60]})
    with pytest.raises(ValueError, match=MESSAGE.format(target, kind)):
        mx.convert_model(model, {"a": config})
    assert [type(module) for module in model.modules()] == before


def test_of_gptqmodel() -> None:
    model = Body()
    model.head = TorchLinear()
    check_refused(model, "head", "BaseQuantLinear")


def test_of_a_converted_layer() -> None:
    model = mx.convert_model(Body(), {"b": lora(target_modules=["head", "body"])})
    mx.set_frozen_weights(model, Rounded)
    mx.remove_adapter(model, "b")
    with pytest.raises(ValueError, match=MESSAGE.format("head", "Linear")):
        mx.add_adapter(model, "a", lora(target_modules=["body"], trainable_token_indices={"head": [3]}))


@pytest.mark.peers
@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_of_bitsandbytes(kind: str) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model: Any = Body()
    head = {
        "4bit": lambda: bnb.nn.Linear4bit(64, 70, quant_type="nf4"),
        "8bit": lambda: bnb.nn.Linear8bitLt(64, 70, has_fp16_weights=False, device="cpu"),
    }[kind]()
    head.load_state_dict(model.head.state_dict())
    model.head = head.to("cpu").requires_grad_(False)
    check_refused(model, "head", type(head).__name__)


@pytest.mark.peers
@pytest.mark.parametrize("target", ["head", "embed"])
def test_of_torchao(target: str) -> None:
    ao = pytest.importorskip("torchao.quantization")
    model = copy.deepcopy(Body()).requires_grad_(False)
    ao.quantize_(model, ao.Int8WeightOnlyConfig(), filter_fn=lambda module, name: name == target)
    assert type(model.get_submodule(target).weight.data) is not Tensor
    check_refused(model, target, "Linear" if target == "head" else "Embedding")
