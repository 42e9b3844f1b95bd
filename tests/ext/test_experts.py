"""Mixtures of experts: the layers that PEFT targets, or a refusal by name where it targets the experts."""

import copy

import pytest
from models import VOCABULARY, token_ids
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import mlora_ext as mx

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "num_experts_per_tok": 2,
}
_ATTENTION = r"Name layers outside of the experts: target_modules=\['q_proj', 'k_proj', 'v_proj', 'o_proj'\]$"


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**_SHAPE, num_local_experts=4))


def qwen2_moe() -> nn.Module:
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**_SHAPE, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16)
    )


def qwen3_moe() -> nn.Module:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SHAPE, num_experts=4, moe_intermediate_size=16, head_dim=8))


@pytest.mark.parametrize(
    ("build", "targets"),
    [
        (mixtral, ["q_proj", "o_proj"]),
        (mixtral, ["q_proj", "gate_proj", "down_proj"]),
        (mixtral, r".*\.0\.self_attn\.(q|k)_proj"),
        (qwen3_moe, ["q_proj", "o_proj"]),
        (qwen2_moe, "all-linear"),
        (qwen2_moe, ["q_proj", "up_proj"]),
    ],
)
def test_same_layers_as_peft(build, targets: str | list[str]) -> None:
    base, config = build(), LoraConfig(r=4, target_modules=targets)
    peft = get_peft_model(copy.deepcopy(base), copy.deepcopy(config))
    expected = {
        key.removeprefix("base_model.model.").replace(".default", "")
        for key, _ in peft.named_parameters()
        if ".lora_" in key
    }
    model = mx.convert_model(base, {"a": config})
    mx.add_adapter(model, "b", config)
    model(input_ids=token_ids(2, 5), adapter_names=["a", "b"]).logits.sum().backward()
    for name in "ab":
        found = mx.adapter_parameters(model, name)
        assert {key.replace(f".{name}.", ".") for key in found} == expected
        assert all(parameter.grad is not None for parameter in found.values())


@pytest.mark.parametrize(
    ("build", "targets", "message"),
    [
        (mixtral, "all-linear", rf"experts \(down_proj, gate\.weight, gate_up_proj\).*{_ATTENTION}"),
        (mixtral, ["w1", "w2", "w3"], rf"experts \(down_proj, gate_up_proj\).*{_ATTENTION}"),
        (mixtral, ["q_proj", "w1"], r"w1 without also targeting w3.*; adapters on experts.*=\['q_proj'\]"),
        (mixtral, None, "=None.* match nothing; linear layers of this model: q_proj"),
        (qwen3_moe, "all-linear", rf"experts \(down_proj, gate\.weight, gate_up_proj\).*{_ATTENTION}"),
        (qwen3_moe, ["v_proj", "gate_proj", "up_proj"], r"experts \(gate_up_proj\).*=\['v_proj'\]$"),
        (qwen3_moe, r".*\.(q_proj|down_proj)", r"experts \(down_proj\).*=\['q_proj'\]$"),
    ],
)
def test_experts_are_refused_by_name(build, targets: str | list[str] | None, message: str) -> None:
    """Where PEFT adapts the fused experts, which are parameters, or refuses itself; says what would work."""
    model = build()
    with pytest.raises(ValueError, match=f"adapter 'a': target_modules.*{message}"):
        mx.convert_model(model, {"a": LoraConfig(r=4, target_modules=targets)})
    assert all(parameter.requires_grad for parameter in model.parameters())
