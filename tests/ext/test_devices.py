"""Devices, on a machine that has one only: `meta` stands for a GPU, and what is made there has no values."""

import pytest
import torch
from models import llama
from peft import LoraConfig

import mlora_ext as mx


def test_masks_are_made_on_their_device() -> None:
    mask = mx.ops.dropout.philox_mask(9, 40, p=0.5, seed=1, step=2, layer=3, device="meta")
    assert (mask.device.type, list(mask.shape)) == ("meta", [9, 40])


@pytest.mark.parametrize("init", [True, False, "gaussian"])
def test_initial_values_do_not_depend_on_the_default_device(init: bool | str) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=init)
    expected = mx.adapter_parameters(mx.convert_model(llama(1), {"a": config}), "a")
    model = llama(1)
    with torch.device("meta"):
        found = mx.adapter_parameters(mx.convert_model(model, {"a": config}), "a")
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name
