"""Entries of a LoraConfig: what they match, patterns that backtrack, and kinds of linear layers."""

import copy
import time
import warnings
from typing import Any

import pytest
import torch
from models import copy_weights, llama, peft_model, token_ids
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
from mlora_ext import add_adapter, convert_model
from mlora_ext.targets import refuse
from tests.mixtures import mixture

SLOW = r"(([a-z._]+)+)+\d\d\d"


class Blocks(nn.Module):
    """Modules with names as long as those of large models."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.ModuleDict({"q_projection_of_attention": nn.Linear(4, 4)})
        self.layers_of_the_decoder_stack = nn.ModuleList(
            [nn.ModuleDict({"self_attention_with_rotary": inner})]
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_modules", SLOW),
        ("exclude_modules", SLOW),
        ("modules_to_save", [SLOW]),
        ("rank_pattern", {SLOW: 4}),
        ("alpha_pattern", {SLOW: 4}),
        ("layers_pattern", SLOW),
        ("rank_pattern", {"(a|aa|[a-z_.0-9]+)*Z": 4}),
        ("rank_pattern", {".*" * 12 + "Z": 4}),
    ],
)
def test_a_pattern_that_backtracks_is_refused(field: str, value: Any) -> None:
    fields: dict[str, Any] = {"target_modules": ["q_projection_of_attention"], "r": 2, field: value}
    if field == "layers_pattern":
        fields["layers_to_transform"] = [0]
    before = time.process_time()
    with pytest.raises(ValueError, match=rf"^adapter 'a': {field}: .* takes too long to match this model"):
        convert_model(Blocks(), {"a": LoraConfig(**fields)})
    assert time.process_time() - before < 2  # of this process: the match is another one's


@pytest.mark.parametrize("value", ["(" * 20_000, "a{99999999999999999999}", "(q"])
@pytest.mark.parametrize("field", ["target_modules", "rank_pattern"])
def test_what_is_no_pattern_is_refused(field: str, value: str) -> None:
    fields: dict[str, Any] = {"target_modules": ["q_projection_of_attention"], "r": 2}
    fields[field] = {value: 4} if field == "rank_pattern" else value
    with pytest.raises(ValueError, match=f"^adapter 'a': {field}: .* is not a pattern: "):
        convert_model(Blocks(), {"a": LoraConfig(**fields)})


def test_patterns_that_cannot_backtrack_need_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have one process for all adapters, and the layers and ranks that PEFT gives them."""
    begun: list[Any] = []
    run = refuse.subprocess.run
    monkeypatch.setattr(refuse.subprocess, "run", lambda *a, **k: begun.append(a) or run(*a, **k))
    refuse._too_slow.cache_clear()
    names = ["q_projection_of_attention"]
    convert_model(Blocks(), {"a": LoraConfig(target_modules=names, rank_pattern={r".*attention": 3})})
    assert not begun
    several = LoraConfig(target_modules=r".*\.q_(projection|proj).*", r=2, rank_pattern={r".*_of_.*n$": 3})
    model = convert_model(Blocks(), {"a": several, "b": several})
    assert len(begun) == 1
    assert {tuple(p.shape) for n, p in model.named_parameters() if "lora_A" in n} == {torch.Size([3, 4])}


def test_other_adapters_add_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a model with many adapters would take ever longer, until a right pattern is refused."""
    asked = []
    monkeypatch.setattr(refuse, "_too_slow", lambda keys, _: asked.append(keys))
    config = LoraConfig(r=2, target_modules=r".*\.(q|k)_proj.*|.*q_projection.*")
    model = convert_model(Blocks(), {"a": config})
    add_adapter(model, "b", config)
    assert asked[-1] == asked[0]


def told(model: nn.Module, **fields: Any) -> list[str]:
    """The warnings of a conversion."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mx.convert_model(model, {"a": LoraConfig(r=2, **fields)})
    return [str(one.message) for one in caught if str(one.message).startswith("adapter 'a': ")]


def test_an_entry_that_matches_nothing() -> None:
    nothing = "adapter 'a': target_modules: {!r} matches nothing in the model; "
    assert told(llama(), target_modules=["q_proj", "self_attn.v_porj", "xyz"]) == [
        nothing.format("self_attn.v_porj") + "did you mean 'v_proj'?",
        nothing.format("xyz")
        + "linear layers: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head",
    ]
    model = mx.convert_model(llama(), {})
    with pytest.warns(UserWarning, match="adapter 'b': target_modules: 'k_porj' matches nothing") as caught:
        mx.add_adapter(model, "b", LoraConfig(r=2, target_modules=["q_proj", "k_porj"]))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="adapter 'c': target_modules: 'k_porj' matches nothing") as caught:
        model.add_adapter(LoraConfig(r=2, target_modules=["q_proj", "k_porj"]), "c")
    assert caught[0].filename == __file__


def test_a_warning_that_is_an_error_leaves_a_whole_adapter() -> None:
    model = mx.convert_model(llama(), {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="'k_porj' matches nothing"):
            mx.add_adapter(model, "b", LoraConfig(r=2, target_modules=["q_proj", "k_porj"]))
    assert list(model.mlora_router.adapters) == ["b"]


def test_all_linear_is_no_hint_at_itself() -> None:
    with pytest.raises(
        ValueError, match=r"\(with exclude_modules\) match nothing; linear layers of this model"
    ):
        mx.convert_model(llama(), {"a": LoraConfig(target_modules="all-linear", exclude_modules=".*")})


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "model.layers.1.mlp.up_proj"]},
        {"target_modules": r".*(q|xyz)_proj"},
        {"target_modules": "all-linear"},
        {},
        {"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["k_proj"]},
        {"target_modules": ["q_proj"], "exclude_modules": r".*\.1\..*"},
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"0.self_attn.q_proj": 3, "v_proj": 4}},
        {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    ],
    ids=str,
)
def test_those_that_match_or_are_patterns(fields: dict[str, Any]) -> None:
    assert told(llama(), **fields) == []


def test_names_that_peft_translates() -> None:
    """Mixtral's experts have been one parameter since Transformers 5; PEFT knows their old names."""
    assert told(mixture("mixtral"), target_modules=["q_proj", "w1", "w2", "w3", "w4"])[0].startswith(
        "adapter 'a': target_modules: 'w4' matches nothing in the model"
    )
    assert told(mixture("mixtral"), target_modules=["q_proj", "w1", "w3"]) == []


NONE = "applies to none of the adapter's layers"
IDLE = {
    "rank_pattern": ({"q_proj": 3, "k_proj": 4}, f"'k_proj' {NONE}"),
    "alpha_pattern": ({"v_porj": 3, "q_proj": 4}, f"'v_porj' {NONE}"),
    "exclude_modules": (["1.self_attn.q_proj", "lm_hea"], "'lm_hea' excludes nothing in the model"),
    "layers_to_transform": ([0, 7], "7 is the index of none of the adapter's layers"),
    "target_parameters": (["self_attn.xyz"], "'self_attn.xyz' matches nothing in the model"),
}


@pytest.mark.parametrize("field", IDLE)
def test_entries_of_other_fields(field: str) -> None:
    """PEFT 0.21 warns of the first two by entry, and of the third if all its entries are idle."""
    entries, line = IDLE[field]
    fields: dict[str, Any] = {"target_modules": ["q_proj"], field: entries}
    if field == "target_parameters":
        entries.append("gate.weight")
        found = told(mixture("mixtral"), **fields)
    else:
        found = told(llama(), **fields)
    assert found == [f"adapter 'a': {field}: {line}"]


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
    message = rf"target 0 is a {kind}; only nn\.Linear, Conv1D and nn\.Emb.*pass exclude_modules=\['0'\]$"
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
