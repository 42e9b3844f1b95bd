"""Experts, as layers or as parameters: what PEFT targets, and each row meets its sample's adapter."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import VOCABULARY, assert_same_gradients, copy_weights, peft_model, token_ids
from peft import LoraConfig, PeftModel, get_peft_model
from tolerances import assert_same_up_to_rounding
from torch import Tensor, nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    MixtralForSequenceClassification,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersExperts

import mlora_ext as mx
from mlora_ext.convert import selected_rows

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


NAMES = ["b", "a", "__base__", "a"]
SIZES: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "vocab_size": 40}
LAYERS: dict[str, Any] = {
    "num_layers": 2,
    "num_sparse_encoder_layers": 2,
    "num_decoder_layers": 1,
    "num_sparse_decoder_layers": 1,
}


def switch() -> nn.Module:
    still = {"dropout_rate": 0.0, "router_jitter_noise": 0.0, "expert_capacity": 3}
    config = SwitchTransformersConfig(**SIZES, **LAYERS, **still, num_experts=4, initializer_factor=1.0)
    return SwitchTransformersForConditionalGeneration(config).eval()


def lora(dropout: float = 0.0) -> dict[str, LoraConfig]:
    return {
        "a": LoraConfig(r=4, target_modules=["wi", "wo", "q"], lora_dropout=dropout),
        "b": LoraConfig(r=6, target_modules="all-linear", lora_dropout=dropout),
    }


def batch() -> dict[str, Tensor]:
    return {key: torch.randint(2, 40, (4, n)) for key, n in (("input_ids", 7), ("decoder_input_ids", 4))}


def rows(given: dict[str, Tensor], places: list[int]) -> dict[str, Tensor]:
    return {key: value[places] for key, value in given.items()}


@pytest.fixture
def fp64() -> Iterator[None]:
    """For gradients: in fp32 a router's choice between two experts may hang on rounding."""
    with mx.use_backend("reference"):
        yield


@pytest.mark.usefixtures("fp64")
def test_as_peft_for_each_adapter_alone() -> None:
    base, given = switch().double(), batch()
    assert sum(isinstance(part, SwitchTransformersExperts) for part in base.modules()) >= 3
    peft, ours = peft_model(base, lora()), mx.convert_model(copy.deepcopy(base), lora())
    copy_weights(peft, ours, lora())
    mixed = ours(**given, adapter_names=NAMES).logits
    mixed.square().mean((1, 2)).sum().backward()
    for name, places in {"a": [1, 3], "b": [0]}.items():
        peft.set_adapter(name)
        alone = peft(**rows(given, places)).logits
        alone.square().mean((1, 2)).sum().backward()
        assert_same_up_to_rounding(mixed[places].detach(), alone.detach(), name)
        assert_same_gradients(ours, peft, name, all_reached=False)
    assert not ours.mlora_router.selected


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_alone_as_together_with_dropout(checkpointed: bool) -> None:
    model, given = mx.convert_model(switch().double(), lora(0.4)).train(), batch()
    for name in "ab":
        for parameter in mx.adapter_parameters(model, name).values():
            parameter.data.normal_(std=0.2)
    if checkpointed:
        model.gradient_checkpointing_enable()

    def trained(places: list[int], name: str) -> tuple[Tensor, dict[str, Tensor | None]]:
        model.mlora_router.step = 3
        model.zero_grad()
        logits = model(**rows(given, places), adapter_names=[NAMES[place] for place in places]).logits
        logits.square().mean((1, 2)).sum().backward()
        return logits.detach(), {key: p.grad for key, p in mx.adapter_parameters(model, name).items()}

    for name, places in {"a": [1, 3], "b": [0]}.items():
        (together, mixed), (alone, own) = trained([0, 1, 2, 3], name), trained(places, name)
        assert_same_up_to_rounding(together[places], alone, name)
        for key, gradient in own.items():
            assert (gradient is None) == (mixed[key] is None), key
            if gradient is not None:
                assert_same_up_to_rounding(mixed[key], gradient, key)


@pytest.mark.parametrize("raised", [ZeroDivisionError, KeyboardInterrupt])
def test_what_ends_a_pass_inside_leaves_nothing_behind(raised: type[BaseException]) -> None:
    model, given = mx.convert_model(switch(), lora()), batch()
    expected = model(**given, adapter_names=NAMES).logits
    inside = next(part for part in model.modules() if isinstance(part, SwitchTransformersExperts))

    def stop(*_: Any) -> None:
        assert model.mlora_router.selected
        raise raised

    handles = [part.register_forward_hook(stop) for part in inside.values()]
    with pytest.raises(raised):
        model(**given, adapter_names=NAMES)
    for handle in handles:
        handle.remove()
    if raised is KeyboardInterrupt:  # PyTorch runs no hook after it
        with mx.route(model, mx.SegmentLayout.from_lengths([5]), names=["a"]):
            assert not model.mlora_router.selected
            next(iter(inside.values()))(torch.randn(5, 16))
    assert not model.mlora_router.selected
    for other in (model, copy.deepcopy(model)):
        assert torch.equal(other(**given, adapter_names=NAMES).logits, expected)
    merged = mx.merge_and_unload(model, "a")
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in merged.modules())


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
@pytest.mark.parametrize("names", [NAMES, ["a"] * 4])
def test_too_little_memory_to_follow_rows_is_said(
    names: list[str], error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = mx.convert_model(switch(), lora(0.4)).train(), batch()
    model(**given, adapter_names=names)

    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(selected_rows, "_numbers_of_parts", fails)
    with pytest.raises(RuntimeError) as caught:
        model(**given, adapter_names=names)
    assert caught.value is error


def test_masks_that_cannot_follow_samples_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = mx.convert_model(switch(), lora(0.4)).train(), batch()

    def fails(*_: Any) -> None:
        raise ValueError("a part gets something else")

    monkeypatch.setattr(selected_rows, "_numbers_of_parts", fails)
    with pytest.raises(ValueError, match=r"experts: cannot tell which of its rows its parts get.*ValueError"):
        model(**given, adapter_names=["a"] * 4)
    model.eval()(**given, adapter_names=["a"] * 4)


def test_only_the_batchs_own_dropout_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = {"a": lora()["a"], "b": lora(0.4)["a"]}
    model, given = mx.convert_model(switch(), configs).train(), batch()
    calls = []
    monkeypatch.setattr(selected_rows, "_numbers_of_parts", lambda *_: calls.append(1) or 1 / 0)
    model(**given, adapter_names=["a"] * 4)
    model(**given, adapter_names=["__base__"] * 4)
    assert not calls
    with pytest.raises(ValueError, match="cannot tell which of its rows"):
        model(**given, adapter_names=["b"] * 4)


def test_other_containers_are_refused_still() -> None:
    class Experts(SwitchTransformersExperts):
        pass

    base, given = switch(), batch()
    for part in base.modules():
        if isinstance(part, SwitchTransformersExperts):
            part.__class__ = Experts
    model = mx.convert_model(base, lora())
    with pytest.raises(ValueError, match=r"as in a mixture of experts|not ordered by sample"):
        model(**given, adapter_names=NAMES)
