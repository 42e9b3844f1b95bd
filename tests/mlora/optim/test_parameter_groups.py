"""Weight decay is Trainer's, and layers that a step did not use have no gradient."""

import pytest
import torch
from mlora.engine.engine import Engine
from mlora.optim.adamw import AdamW
from mlora.optim.groups import ParameterGroup
from mlora.optim.optim_config import OptimConfig
from mlora.optim.step_rule import Update
from peft import LoraConfig, get_peft_model
from tiny_models import make
from torch import nn
from transformers import (
    LlamaForTokenClassification,
    PreTrainedModel,
    Trainer,
)

import mlora_ext
import mlora_ext as mx
from mlora_ext.layers.adapter_weights import written_marks
from tests.mixtures import mixture

NAMES = ["plain", "debias", "my_norm", "lora_A", "lora_B", "lora_1", "lora_embedding_A"]
LLAMA = {"target_modules": ["q_proj"], "modules_to_save": ["norm", "lm_head"]}
LORAS = {
    "llama": LLAMA,
    "gpt2": {"target_modules": ["c_attn"], "modules_to_save": ["ln_f"], "fan_in_fan_out": True},
    "labels": {"target_modules": ["q_proj"], "task_type": "TOKEN_CLS"},
}


def groups(engine: Engine, name: str) -> dict[str, ParameterGroup]:
    """Returns the group of each of an adapter's Parameters, by its key."""
    optimizer = engine._part._optimizers[name]
    return {optimizer.keys[i]: group for group, own in optimizer.groups.items() for i in sorted(own)}


def peers_model(case: str) -> PreTrainedModel:
    if case != "labels":
        return make(case)
    config = make("llama").config
    config.num_labels = 3
    return LlamaForTokenClassification(config)


@pytest.mark.parametrize("case", LORAS)
def test_weight_decay_is_trainers(case: str) -> None:
    lora = LoraConfig(**LORAS[case])
    peer = get_peft_model(peers_model(case), LoraConfig(**LORAS[case]))
    decayed = set(Trainer.get_decay_parameter_names(None, peer))
    expected = {
        key.removeprefix("base_model.model."): 0.1 if key in decayed else 0.0
        for key, parameter in peer.named_parameters()
        if parameter.requires_grad
    }
    if case == "labels":
        lora.__dict__["num_labels"] = 3
    engine = Engine(make("llama" if case == "labels" else case))
    engine.create_adapter("a", lora, OptimConfig(1e-3, "adamw_torch", 0.1, total_steps=1))
    found = {key.replace(".a.", ".default."): g.weight_decay for key, g in groups(engine, "a").items()}
    assert found == expected
    assert set(found.values()) == {0.0, 0.1}


@pytest.mark.parametrize("optim", ["adamw_torch", "lora_fa"])
def test_an_adapters_name_changes_nothing(optim: str) -> None:
    engine, found, trained = Engine(make("llama")), {}, {}
    config = OptimConfig(1e-3, optim, 0.1, total_steps=1, loraplus_lr_ratio=4.0)
    for name in NAMES:
        engine.create_adapter(name, LoraConfig(**LLAMA), config)
        parameters, own = mlora_ext.adapter_parameters(engine.model, name), groups(engine, name)
        found[name] = [own[key] for key in parameters]
        trained[name] = [p.requires_grad for p in parameters.values()]
    assert all(one == found["plain"] for one in found.values())
    assert all(one == trained["plain"] for one in trained.values())
    assert set(found["plain"]) == {
        ParameterGroup(1.0, 0.1),
        ParameterGroup(4.0, 0.1),
        ParameterGroup(4.0, 0.0),
    }
    assert trained["plain"].count(False) == (2 if optim == "lora_fa" else 0)


def test_lora_fa_resumes_under_any_name() -> None:
    lora, config = LoraConfig(**LLAMA), OptimConfig(1e-3, "lora_fa", total_steps=1)
    for name in ("plain", "lora_A"):
        engine = Engine(make("llama"))
        engine.create_adapter(name, lora, config)
        optimizer = engine._part._optimizers[name]
        optimizer.begin()
        for tensors in optimizer.state:
            for tensor in tensors:
                tensor.fill_(3.0)
        state = engine.state_dict(name)
        again = Engine(make("llama"))
        again.create_adapter(name, lora, config)
        again.load_state_dict(name, state)
        assert all(bool((t == 3).all()) for own in again._part._optimizers[name].state for t in own)
        assert any(again._part._optimizers[name].state)
        others = state | {"moments": dict(list(state["moments"].items())[1:])}
        with pytest.raises(ValueError, match="moments are those of other Parameters"):
            again.load_state_dict(name, others)


def test_lora_fa_refuses_adapters_on_experts() -> None:
    engine = Engine(mixture("gpt_oss"))
    lora = LoraConfig(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"])
    config = OptimConfig(optim="lora_fa", total_steps=1)
    with pytest.raises(
        ValueError, match=r"'lora_fa' does not serve lora\.target_parameters, got .*_lora_A"
    ) as error:
        engine.create_adapter("a", lora, config)
    assert "\n" not in str(error.value)
    engine.create_adapter("a", lora, OptimConfig(total_steps=1))


class OneOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.used(x)
        return found


def test_a_layer_that_backward_does_not_reach_is_not_decayed() -> None:
    """Zeros do not tell; the layer's marks do."""
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = mx.convert_model(OneOfTwo(), {"a": config}).train()
    router = model.mlora_router
    router.accumulates = True
    optimizer = AdamW(
        mx.adapter_parameters(model, "a"), OptimConfig(learning_rate=0.1, weight_decay=0.5, total_steps=3)
    )
    optimizer.hold_gradients("a", written_marks(model, "a"))
    router.moved()
    before = [p.detach().clone() for p in optimizer.parameters]
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
        assert list(optimizer.gradients()) == [0, 1]
        optimizer.apply(Update(learning_rate=0.1, scale=1.0, taken=True))
        router.updates.record("a")
        assert not optimizer.gradients()
    changed = [not torch.equal(p, old) for p, old in zip(optimizer.parameters, before, strict=True)]
    assert changed == [True, True, False, False]
