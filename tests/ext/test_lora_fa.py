"""PEFT's LoRA-FA optimizer on a converted model: as on PEFT's own, or one line where it cannot work."""

import copy

import pytest
from models import copy_weights, llama, peft_model, token_ids
from peft import LoraConfig
from peft.optimizers import create_lorafa_optimizer
from tolerances import assert_same_up_to_rounding
from torch import nn

import mlora_ext as mx


def config() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", alpha_pattern={"q_proj": 3})


@pytest.mark.parametrize("way", ["convert_model", "from_peft"])
def test_trains_as_pefts(way: str) -> None:
    base, ids = llama(), token_ids(2, 6)
    peft = peft_model(base, {"a": config()})
    if way == "from_peft":
        model = mx.from_peft(copy.deepcopy(peft))
    else:
        model = mx.convert_model(copy.deepcopy(base), {"a": config()})
        copy_weights(peft, model, {"a": config()})
    begin = {key: p.detach().clone() for key, p in mx.adapter_parameters(model, "a").items()}

    def train(trained: nn.Module) -> None:
        optimizer = create_lorafa_optimizer(trained, r=4, lora_alpha=8, lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            trained(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()

    train(peft)
    train(model)
    state = dict(peft.named_parameters())
    for key, parameter in mx.adapter_parameters(model, "a").items():
        assert_same_up_to_rounding(parameter, state[f"base_model.model.{key}"].detach(), key, 1e-4)
        assert (".lora_A." in key) == parameter.equal(begin[key])


def test_several_adapters_are_refused_in_one_line() -> None:
    model = mx.convert_model(llama(), {"a": config(), "b": config()})
    assert model.active_adapters() == ["a", "b"]
    with pytest.raises(ValueError, match=r"active_adapters: this model has 2 adapters \(a, b\), and PEFT's"):
        create_lorafa_optimizer(model, r=4, lora_alpha=8, lr=1e-3)
    assert all(p.requires_grad for p in mx.adapter_parameters(model, "a").values())
