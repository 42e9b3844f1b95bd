"""What from_peft takes: models of get_peft_model, LoraModel, inject_adapter_in_model and add_adapter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import llama, token_ids
from peft import (
    IA3Config,
    LoraConfig,
    LoraModel,
    PromptTuningConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from tolerances import assert_same_up_to_rounding
from torch import nn

import mlora_ext as mx

pytestmark = pytest.mark.usefixtures("transformers_own_adapters")


def config() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=9, target_modules=["q_proj", "down_proj"], init_lora_weights=False)


def with_get_peft_model() -> nn.Module:
    return get_peft_model(llama(), config(), adapter_name="a")


def with_lora_model() -> nn.Module:
    return LoraModel(llama(), config(), "a")


def with_injection() -> nn.Module:
    return inject_adapter_in_model(config(), llama(), "a")


def with_add_adapter() -> nn.Module:
    model = llama()
    model.add_adapter(config(), "a")
    return model


def injected_twice() -> nn.Module:
    model = with_add_adapter()
    model.add_adapter(config(), "b")
    model.set_adapter("a")
    return model


BUILDS = [with_get_peft_model, with_lora_model, with_injection, with_add_adapter, injected_twice]


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_taken_over(build: Callable[[], Any]) -> None:
    theirs, ids = build().eval(), token_ids(2, 5)
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
        model = mx.from_peft(theirs)
        got = model(input_ids=ids, adapter_names=["a", "a"]).logits
        assert_same_up_to_rounding(got, expected, "logits")
        base = model(input_ids=ids, adapter_names=["__base__"] * 2).logits
    assert not torch.allclose(base, expected, atol=1e-2)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not any("base_layer" in key for key, _ in model.named_modules())
    mx.add_adapter(model, "c", config())


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_refused_as_they_were(build: Callable[[], Any]) -> None:
    theirs, ids = build().eval(), token_ids(2, 5)
    next(p for p in theirs.parameters() if not p.requires_grad).requires_grad_(True)
    before, fields = [id(module) for module in theirs.modules()], set(vars(theirs))
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
        with pytest.raises(ValueError, match=r"embed_tokens\.weight of the base requires a gradient"):
            mx.from_peft(theirs)
        assert torch.equal(theirs(input_ids=ids).logits, expected)
    assert [id(module) for module in theirs.modules()] == before
    assert set(vars(theirs)) == fields


def unloaded() -> nn.Module:
    model = with_get_peft_model()
    model.unload()
    return model


NOTHING = (
    r"peft_model: expected a PeftModel, a LoraModel, or a model with adapters from "
    r"inject_adapter_in_model or add_adapter, got a plain {}; convert it with "
    r"mlora_ext\.convert_model"
)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (llama, NOTHING.format("LlamaForCausalLM")),
        (lambda: "model", "peft_model: expected a model with PEFT's adapters, got str"),
        (lambda: nn.Sequential(with_add_adapter()), NOTHING.format("Sequential")),
        (
            lambda: mx.convert_model(llama(), {"a": config()}),
            "peft_model: is already converted; use",
        ),
        (unloaded, "peft_model: has no LoRA layers; were they unloaded or merged already"),
        (
            lambda: get_peft_model(llama(), IA3Config(target_modules=["q_proj"], feedforward_modules=[])),
            "adapter 'default': expected a peft.LoraConfig, got IA3Config",
        ),
        (
            lambda: get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
            "adapter 'default': expected a peft.LoraConfig, got PromptTuningConfig",
        ),
    ],
)
def test_refused(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mx.from_peft(build())
