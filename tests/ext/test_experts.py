"""Mixtures of experts: the layers and parameters that PEFT targets."""

import copy
from pathlib import Path

import pytest
import torch
from models import VOCABULARY, token_ids
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    MixtralForSequenceClassification,
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
        (mixtral, "all-linear"),
        (mixtral, ["w1", "w2", "w3"]),
        (qwen2_moe, "all-linear"),
        (qwen2_moe, ["q_proj", "up_proj"]),
        (qwen3_moe, ["q_proj", "o_proj"]),
        (qwen3_moe, "all-linear"),
        (qwen3_moe, ["v_proj", "gate_proj", "up_proj"]),
        (qwen3_moe, r".*\.(q_proj|down_proj)"),
    ],
)
def test_same_layers_as_peft(build, targets: str | list[str], tmp_path: Path) -> None:
    """Of a new model and of one that is converted; folders name them, too."""
    base, config = build(), LoraConfig(r=4, target_modules=targets)
    expected = peft_keys(get_peft_model(copy.deepcopy(base), copy.deepcopy(config)))
    model = mx.convert_model(copy.deepcopy(base), {"a": config})
    mx.add_adapter(model, "b", config)
    model(input_ids=token_ids(2, 5), adapter_names=["a", "b"]).logits.sum().backward()
    for name in "ab":
        mx.save_adapter(model, name, tmp_path / name)
        assert peft_keys(PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / name)) == expected
        found = mx.adapter_parameters(model, name)
        assert sorted(tuple(parameter.shape) for parameter in found.values()) == sorted(expected.values())
        assert all(parameter.grad is not None for parameter in found.values())


def peft_keys(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(p.shape) for key, p in model.named_parameters() if ".lora_" in key}


@pytest.mark.parametrize(
    ("build", "targets", "message"),
    [
        (mixtral, ["q_proj", "w1"], "w1 without also targeting w3"),
        (mixtral, None, "=None.* match nothing; linear layers of this model: q_proj"),
    ],
)
def test_what_peft_refuses(build, targets: str | list[str] | None, message: str) -> None:
    model = build()
    with pytest.raises(ValueError, match=f"adapter 'a': target_modules.*{message}"):
        mx.convert_model(model, {"a": LoraConfig(r=4, target_modules=targets)})
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("build", [mixtral, qwen2_moe, qwen3_moe])
def test_the_routers_loss_of_a_batch(build, tmp_path: Path) -> None:
    """With one adapter it is PEFT's; with several it would couple them, so it is refused."""
    base, tokens = build(), token_ids(2, 5)
    base.config.output_router_logits = True
    model = mx.convert_model(
        copy.deepcopy(base), {name: LoraConfig(r=4, target_modules=["q_proj"]) for name in "ab"}
    )
    mx.save_adapter(model, "a", tmp_path)
    peft = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path, is_trainable=True)
    call = {"input_ids": tokens, "labels": tokens}
    ours, theirs = model(**call, adapter_names=["a", "a"]), peft(**call)
    assert ours.aux_loss is not None
    torch.testing.assert_close(ours.loss, theirs.loss)
    for names in (["a", "b"], ["a", "__base__"]):
        with pytest.raises(ValueError, match=r"^output_router_logits: .* output_router_logits=False, or"):
            model(**call, adapter_names=names)
        model(input_ids=tokens, adapter_names=names)
        plain = model(**call, adapter_names=names, output_router_logits=False)
        assert plain.aux_loss is None
    refused = pytest.raises(ValueError, match=r"^output_router_logits")
    layout, mixed = mx.SegmentLayout.from_lengths([5, 5]), {"adapter_names": ["a", "b"]}
    with mx.route(model, layout, names=["a", "b"]), refused:
        model(**call)
    with refused:
        model(tokens, None, None, None, None, tokens, **mixed)
    with refused:
        model(**call, **mixed, return_dict=False)
    model(**call, **mixed, return_dict=False, output_router_logits=False)
    model.config.output_router_logits = False
    model(**call, **mixed)
    with refused:
        model(**call, **mixed, output_router_logits=True)
    model.config.router_aux_loss_coef = 0.0  # models have read it
    with refused:
        model(**call, **mixed, output_router_logits=True)
    model.router_aux_loss_coef = 0.0
    model(**call, **mixed, output_router_logits=True)


class Inside(nn.Module):
    """A model in a module of one's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=input_ids, labels=input_ids).loss
        return loss


def test_the_routers_loss_inside_a_module_of_ones_own() -> None:
    base = mixtral()
    base.config.output_router_logits = True
    lora = LoraConfig(r=4, target_modules=["q_proj"])
    model = mx.convert_model(Inside(base), {"a": lora, "b": lora})
    model(token_ids(2, 5), adapter_names=["a", "a"]).backward()
    with pytest.raises(ValueError, match=r"^output_router_logits"):
        model(token_ids(2, 5), adapter_names=["a", "b"])
    again = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"^output_router_logits"):
        again(token_ids(2, 5), adapter_names=["a", "b"])
    again.model.config.output_router_logits = False
    again(token_ids(2, 5), adapter_names=["a", "b"]).backward()


def test_models_that_add_no_routers_loss_are_served() -> None:
    config = MixtralConfig(**_SHAPE, num_local_experts=4, output_router_logits=True, pad_token_id=0)
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS")
    model = mx.convert_model(MixtralForSequenceClassification(config), {"a": lora, "b": lora})
    model(token_ids(2, 5), labels=torch.tensor([0, 1]), adapter_names=["a", "b"]).loss.backward()
    for name in "ab":
        assert all(parameter.grad is not None for parameter in mx.adapter_parameters(model, name).values())
