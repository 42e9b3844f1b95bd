"""Subclasses of nn.Linear: served where they compute what nn.Linear does, otherwise refused by name."""

import copy

import pytest
import torch
from models import copy_weights, peft_model, token_ids
from peft import LoraConfig
from tolerances import assert_as_exact, in_other_orders
from torch import Tensor, nn
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

import mlora_ext as mx


class Plain(nn.Linear):
    """Keeps nn.Linear's forward."""


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Scaled(nn.Linear):
    """Keeps nn.Linear's forward, and holds more than a weight and a bias."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out)
        self.register_buffer("scale", torch.ones(()))


def parametrized() -> nn.Linear:
    return nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))


def falcon() -> PreTrainedModel:
    return FalconForCausalLM(
        FalconConfig(
            vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.2
        )
    ).eval()


CONFIG = {
    "a": LoraConfig(r=4, target_modules="all-linear"),
    "b": LoraConfig(r=16, target_modules="all-linear"),
}


@pytest.mark.parametrize("kind", [Plain, nn.Linear])
def test_a_subclass_with_nn_linears_forward_is_served_as_by_peft(kind: type[nn.Linear]) -> None:
    base = nn.Sequential(kind(6, 8), nn.ReLU(), kind(8, 5, bias=False))
    peft = peft_model(base, CONFIG)
    ours = mx.convert_model(copy.deepcopy(base), CONFIG)
    copy_weights(peft, ours, CONFIG)
    assert (ours[0].in_features, ours[0].out_features) == (6, 8)
    x = torch.randn(3, 6)

    def theirs(model: nn.Module, x: Tensor) -> Tensor:
        rows = []
        for index, name in enumerate(["a", "b", "a"]):
            model.set_adapter(name)
            rows.append(model(x[index : index + 1]))
        return torch.cat(rows).detach()

    draws = in_other_orders(lambda: [theirs(peft, x)])[0]
    oracle = theirs(copy.deepcopy(peft).double(), x.double())
    got = ours(x, adapter_names=["a", "b", "a"]).detach()
    assert_as_exact(got, draws, oracle, "output", of_a_model=True)


def test_falcon_is_served_as_by_peft() -> None:
    """`FalconLinear` writes nn.Linear's product in its own forward."""
    base = falcon()
    peft = peft_model(base, CONFIG).eval()
    ours = mx.convert_model(copy.deepcopy(base), CONFIG)
    copy_weights(peft, ours, CONFIG)
    ids, names = token_ids(4, 7), ["a", "b", "__base__", "a"]

    def logits(model: nn.Module) -> Tensor:
        return model(input_ids=ids, adapter_names=names).logits.detach()

    draws = in_other_orders(lambda: [logits(peft)])[0]
    oracle = logits(copy.deepcopy(peft).double())
    assert_as_exact(logits(ours), draws, oracle, "logits", of_a_model=True)


@pytest.mark.parametrize(
    ("module", "kind"),
    [(Doubled(6, 8), "Doubled"), (Scaled(6, 8), "Scaled"), (parametrized(), "ParametrizedLinear")],
    ids=["own forward", "own state", "parametrized"],
)
def test_other_subclasses_are_refused_by_name(module: nn.Linear, kind: str) -> None:
    base = nn.Sequential(module, nn.Linear(8, 5))
    message = (
        rf"target 0 is a {kind}; only nn\.Linear, Conv1D and nn\.Embedding .*pass exclude_modules=\['0'\]$"
    )
    with pytest.raises(ValueError, match=message):
        mx.convert_model(base, {"a": LoraConfig(target_modules="all-linear")})
    model = mx.convert_model(base, {"a": LoraConfig(target_modules="all-linear", exclude_modules=["0"])})
    assert type(model[0]) is type(module)


def test_a_part_of_multihead_attention_is_refused_with_the_reason() -> None:
    base = nn.ModuleDict({"mha": nn.MultiheadAttention(8, 2), "out": nn.Linear(8, 4)})
    message = (
        r"target mha\.out_proj is not supported: nn\.MultiheadAttention .*exclude_modules=\['out_proj'\]$"
    )
    with pytest.raises(ValueError, match=message):
        mx.convert_model(base, {"a": LoraConfig(target_modules="all-linear")})


def test_a_layer_that_mambas_kernels_bypass_is_refused_as_by_peft() -> None:
    base = MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=16, state_size=4, num_hidden_layers=2))
    message = r"0\.mixer\.out_proj is not supported: Mamba.*exclude_modules=\['out_proj'\]$"
    with pytest.raises(ValueError, match=message):
        mx.convert_model(base, {"a": LoraConfig(target_modules="all-linear")})
    with pytest.raises(ValueError, match="'out_proj' is incompatible with Mamba"):
        peft_model(base, {"a": LoraConfig(target_modules="all-linear")})
    config = LoraConfig(target_modules="all-linear", exclude_modules=["out_proj"])
    assert mx.adapter_parameters(mx.convert_model(base, {"a": config}), "a")


def test_a_router_is_refused_with_what_to_leave_out() -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Llama4TextConfig(
        **shape,
        intermediate_size=48,
        intermediate_size_mlp=48,
        head_dim=8,
        num_local_experts=2,
        vocab_size=61,
    )
    with pytest.raises(ValueError, match=r"router is a Llama4Router; .*exclude_modules=\['router'\]$"):
        mx.convert_model(Llama4ForCausalLM(config), {"a": LoraConfig(target_modules="all-linear")})
