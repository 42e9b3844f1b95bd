"""Converted models against PEFT's: the same layers, logits, gradients and initial values; refusals."""

import copy
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from models import VOCABULARY, copy_weights, gpt2, llama, norm_in_any_dtype, peft_model, token_ids
from peft import LoraConfig, get_peft_model
from tolerances import assert_as_exact, assert_same_up_to_rounding, in_other_orders
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import mlora_ext as mx

LLAMA = {
    "names": {"target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "regex": {"target_modules": r".*\.mlp\.(up|down)_proj", "r": 5},
    "default targets": {},
    "full name": {"target_modules": ["model.layers.1.mlp.up_proj", "o_proj"]},
    "head": {"target_modules": ["lm_head", "k_proj"]},
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
    "excluded regex": {"target_modules": ["q_proj", "o_proj"], "exclude_modules": r".*\.0\..*"},
    "layers": {"target_modules": ["q_proj"], "layers_to_transform": [1]},
    "layers pattern": {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
    "rank pattern": {
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 3, r".*\.0\.mlp\.up_proj": 17},
    },
    "alpha pattern": {"target_modules": ["q_proj", "v_proj"], "alpha_pattern": {"v_proj": 32}},
    "rslora": {"target_modules": ["q_proj"], "r": 7, "lora_alpha": 3, "use_rslora": True},
}
GPT2 = {
    "default targets": {"fan_in_fan_out": True},
    "all-linear": {"target_modules": "all-linear", "fan_in_fan_out": True},
    "names": {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True, "r": 3},
}


def config(**fields: object) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 8, **fields})


@pytest.mark.parametrize(
    ("build", "fields"),
    [(llama, f) for f in LLAMA.values()] + [(gpt2, f) for f in GPT2.values()],
    ids=[f"llama, {name}" for name in LLAMA] + [f"gpt2, {name}" for name in GPT2],
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_same_as_peft(build, fields: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a second adapter with other targets: logits and every gradient, against PEFT's in fp64."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_any_dtype)
    base = build().eval()
    configs = {"one": config(**fields), "two": config(r=6, target_modules="all-linear")}
    peft = peft_model(base, configs).eval()
    ours = mx.convert_model(copy.deepcopy(base), configs)
    copy_weights(peft, ours, configs)
    ids, names = token_ids(4, 7), ["one", "two", "__base__", "one"]
    weights = torch.randn(4, 7, VOCABULARY)

    def results(model: nn.Module, parameters: dict[str, nn.Parameter]) -> list[torch.Tensor]:
        logits = model(input_ids=ids, adapter_names=names).logits
        return [logits.detach(), *torch.autograd.grad((logits * weights).sum(), list(parameters.values()))]

    mine = {key: p for name in configs for key, p in mx.adapter_parameters(ours, name).items()}

    def theirs(model: nn.Module) -> list[torch.Tensor]:
        return results(model, {key: model.get_parameter(f"base_model.model.{key}") for key in mine})

    plain, oracle = in_other_orders(lambda: theirs(peft)), theirs(copy.deepcopy(peft).double())
    for what, got, draws, exact in zip(["logits", *mine], results(ours, mine), plain, oracle, strict=True):
        assert_as_exact(got, draws, exact, what, of_a_model=True)


@pytest.mark.parametrize("how", [True, False, "gaussian"])
def test_initial_values_have_pefts_distribution(how: bool | str) -> None:
    base = nn.Sequential(nn.Linear(400, 300))
    fields = {"target_modules": ["0"], "init_lora_weights": how, "r": 8}
    model = mx.convert_model(copy.deepcopy(base), {"a": config(**fields)})
    theirs = dict(get_peft_model(copy.deepcopy(base), config(**fields)).named_parameters())
    for key, ours in mx.adapter_parameters(model, "a").items():
        peft = theirs[f"base_model.model.{key.replace('.a.', '.default.')}"].detach()
        assert torch.allclose(ours.std(), peft.std(), rtol=0.1), key
        if how == "gaussian":
            assert torch.allclose(ours.abs().quantile(0.99), peft.abs().quantile(0.99), rtol=0.2), key
        else:
            assert torch.allclose(ours.abs().max(), peft.abs().max(), rtol=0.02), key


def test_initial_values_depend_on_seed_and_names_only() -> None:
    def adapters(*names: str, seed: int = 3) -> nn.Module:
        return mx.convert_model(llama(), {n: config(target_modules="all-linear") for n in names}, seed=seed)

    alone, beside, other = adapters("x"), adapters("y", "x"), adapters("x", seed=4)
    late = adapters("y")
    mx.add_adapter(late, "x", config(target_modules="all-linear"), seed=3)
    same = [mx.adapter_parameters(model, "x") for model in (alone, beside, late)]
    for key, value in same[0].items():
        assert torch.equal(value, same[1][key])
        assert torch.equal(value, same[2][key])
        if "lora_A" in key:
            assert not torch.equal(value, mx.adapter_parameters(other, "x")[key])
            assert not torch.equal(value, mx.adapter_parameters(beside, "y")[key.replace(".x.", ".y.")])


def test_same_dropout_alone_and_beside_others() -> None:
    """Masks follow the adapter: the same logits for its rows alone, though layers and batch differ."""
    base, ids = llama(), token_ids(2, 6)
    fields = config(target_modules=["v_proj", "down_proj"], lora_dropout=0.5, init_lora_weights=False)
    other = config(target_modules="all-linear", lora_dropout=0.2, init_lora_weights=False)
    alone = mx.convert_model(copy.deepcopy(base), {"x": fields}).train()
    beside = mx.convert_model(copy.deepcopy(base), {"y": other, "x": fields}).train()
    one = alone(input_ids=ids).logits
    two = beside(input_ids=torch.cat([token_ids(1, 6), ids]), adapter_names=["y", "x", "x"]).logits[1:]
    assert_same_up_to_rounding(one, two, "logits")
    assert not torch.allclose(one, alone.eval()(input_ids=ids).logits, atol=1e-2), "dropout did nothing"


def test_base_keys_and_checkpoints_stay() -> None:
    base = llama()
    state = {key: value.clone() for key, value in base.state_dict().items()}
    model = mx.convert_model(base, {"a": config(target_modules="all-linear")})
    assert set(state) <= set(model.state_dict())
    other = {key: torch.randn_like(value) for key, value in state.items()}
    missing, unexpected = model.load_state_dict(other, strict=False)
    assert not unexpected
    assert all(".lora_" in key for key in missing)
    torch.testing.assert_close(
        model.model.layers[0].mlp.up_proj.weight, other["model.layers.0.mlp.up_proj.weight"]
    )


def test_only_adapters_are_trained() -> None:
    model = mx.convert_model(llama(), {"a": config(target_modules="all-linear"), "b": config()})
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == set(mx.adapter_parameters(model, "a")) | set(mx.adapter_parameters(model, "b"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_adapters_of_a_half_base_are_fp32(dtype: torch.dtype) -> None:
    model = mx.convert_model(llama().to(dtype), {"a": config(target_modules="all-linear")})
    assert {p.dtype for p in mx.adapter_parameters(model, "a").values()} == {torch.float32}
    logits = model(input_ids=token_ids(1, 5)).logits
    assert logits.dtype == dtype
    logits.float().sum().backward()
    assert all(p.grad is not None for p in mx.adapter_parameters(model, "a").values())


def test_model_survives_conversions() -> None:
    configs = {"a": config(target_modules="all-linear", init_lora_weights=False), "b": config(r=3)}
    model = mx.convert_model(llama(), configs).eval()
    ids, names = token_ids(2, 5), ["a", "b"]
    expected = model(input_ids=ids, adapter_names=names).logits
    for changed in (
        copy.deepcopy(model),
        copy.deepcopy(model).double().float(),
        copy.deepcopy(model).to("cpu", torch.float64).to(torch.float32),
    ):
        torch.testing.assert_close(changed(input_ids=ids, adapter_names=names).logits, expected)
        for parameter in mx.adapter_parameters(changed, "a").values():
            parameter.data.zero_()
        torch.testing.assert_close(model(input_ids=ids, adapter_names=names).logits, expected)
        assert not torch.allclose(changed(input_ids=ids, adapter_names=names).logits, expected)
    with torch.no_grad():
        half = copy.deepcopy(model).half()(input_ids=ids, adapter_names=names).logits
    torch.testing.assert_close(half.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("when", ["before", "after"])
def test_fp64_scales_in_fp64(when: str) -> None:
    """8 / 6 is no number of fp32's."""
    base = nn.Sequential(nn.Linear(6, 8))
    base = base.double() if when == "before" else base
    model = mx.convert_model(
        base, {"a": config(r=6, lora_alpha=8, target_modules=["0"], init_lora_weights=False)}
    )
    model, x = model.double(), torch.randn(4, 6, dtype=torch.float64)
    a, b = (weight.detach() for weight in mx.adapter_parameters(model, "a").values())
    expected = x @ model[0].weight.T + model[0].bias + 8 / 6 * (x @ a.T @ b.T)
    with mx.use_backend("reference"):
        got = model(x, adapter_names=["a"] * 4)
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)
        single = model.float()(x.float(), adapter_names=["a"] * 4)
        assert_same_up_to_rounding(single, expected, "in fp32 afterwards")


def test_meta_and_back_keeps_dropout_masks() -> None:
    """Moving a model to another device takes its routes and layer indices along."""
    base = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    targets = config(target_modules=["0", "1"], lora_dropout=0.5, init_lora_weights=False)
    model = mx.convert_model(base, {"a": targets, "b": targets}).train()
    state, x = model.state_dict(), torch.randn(4, 6)
    expected = model(x, adapter_names=["a", "b", "a", "b"])
    moved = copy.deepcopy(model).to("meta")
    assert {group.device.type for group in {m.group for m in moved}} == {"meta"}
    moved.to_empty(device="cpu").load_state_dict(state)
    moved.mlora_router.step = 0
    assert torch.equal(moved(x, adapter_names=["a", "b", "a", "b"]), expected)


def test_add_and_remove_change_no_one_else() -> None:
    model = mx.convert_model(llama(), {"a": config(init_lora_weights=False), "b": config()}).eval()
    ids = token_ids(1, 5)
    before = model(input_ids=ids, adapter_names=["a"]).logits
    mx.add_adapter(model, "c", config(r=9, target_modules="all-linear", init_lora_weights=False))
    mx.remove_adapter(model, "b")
    assert torch.equal(model(input_ids=ids, adapter_names=["a"]).logits, before)
    assert not torch.allclose(model(input_ids=ids, adapter_names=["c"]).logits, before)
    with pytest.raises(ValueError, match=r"no adapter 'b' in this model; its adapters: a, c"):
        model(input_ids=ids, adapter_names=["b"])
    mx.add_adapter(model, "b", config(r=2, target_modules=["k_proj"]))
    model(input_ids=ids, adapter_names=["b"])


def test_base_dropout_is_stopped_with_one_warning() -> None:
    base = gpt2()
    for module in base.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    base.config.attention_dropout, base.config.dropout_layers = 0.1, 2
    with pytest.warns(UserWarning, match="dropouts of the base model were set to 0") as caught:
        model = mx.convert_model(base, {"a": config(fan_in_fan_out=True)}).train()
    assert len(caught) == 1
    assert (base.config.attention_dropout, base.config.dropout_layers) == (0.0, 2)
    ids = token_ids(1, 9)
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def small_with_dropout() -> nn.Module:
    return nn.Sequential(OrderedDict(lin=nn.Linear(4, 4), drop=nn.Dropout(0.1)))


def by_convert(base: nn.Module, folder: Path) -> None:
    mx.convert_model(base, {"one": LoraConfig(r=2, target_modules=["lin"])})


def by_from_peft(base: nn.Module, folder: Path) -> None:
    mx.from_peft(get_peft_model(base, LoraConfig(r=2, target_modules=["lin"]), "one"))


def by_load(base: nn.Module, folder: Path) -> None:
    mx.load_adapter(base, "one", folder)


WAYS = [by_convert, by_from_peft, by_load]


@pytest.fixture
def saved_adapter(tmp_path: Path) -> Path:
    base = small_with_dropout()
    base.drop.p = 0.0
    by_convert(base, tmp_path)
    mx.save_adapter(base, "one", tmp_path / "one")
    return tmp_path / "one"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("action", ["always", "error"])
def test_the_warning_of_dropouts(
    action: str, way: Callable[[nn.Module, Path], None], saved_adapter: Path
) -> None:
    """It names the caller's line; where it is an error the model is whole."""
    base, message = small_with_dropout(), "dropouts of the base model were set to 0"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        with pytest.raises(UserWarning, match=message) if action == "error" else nullcontext():
            way(base, saved_adapter)
    if action == "always":
        assert [one.filename for one in caught if message in str(one.message)] == [__file__]
    assert mx.adapter_parameters(base, "one")
    base(torch.ones(2, 4), adapter_names=["one", "__base__"])


REFUSED = [
    ({"use_dora": True, "use_qalora": True}, "use_qalora=True is not supported"),
    ({"lora_bias": True, "bias": "all"}, "bias='all' is not supported"),
    ({"bias": "lora_only"}, "bias='lora_only' is not supported; lora_bias=True trains"),
    ({"layer_replication": [(0, 1)]}, "layer_replication"),
    ({"target_parameters": ["x.weight"]}, "target_parameters"),
    ({"use_qalora": True}, "use_qalora=True is not supported"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ({"init_lora_weights": "pissa_niter_"}, "init_lora_weights='pissa_niter_' is not supported"),
    ({"init_lora_weights": "orthogonal", "r": 3}, "'orthogonal' needs even ranks, got 3"),
    (
        {"task_type": "SEQ_CLS"},
        "task_type='SEQ_CLS' trains a head named classifier or score, and the",
    ),
    ({"r": 0}, "r: expected an integer >= 1, got 0"),
    ({"rank_pattern": {"q_proj": 0}}, "r: expected an integer >= 1, got 0"),
    ({"rank_pattern": [3]}, r"rank_pattern: expected a dict, got \[3\]"),
    ({"alpha_pattern": {"q_proj": "x"}}, "lora_alpha: expected a finite number, got 'x'"),
    ({"lora_alpha": None}, "lora_alpha: expected a finite number, got None"),
    ({"exclude_modules": 3}, "exclude_modules: expected a pattern or names, got 3"),
    ({"target_modules": [None]}, r"target_modules: expected a pattern or names, got \{None\}"),
    ({"target_modules": "("}, r"target_modules: '\(' is not a pattern: missing \)"),
    ({"layers_to_transform": 1.5}, "layers_to_transform: expected indices, got 1.5"),
    ({"layers_to_transform": ["x"]}, r"layers_to_transform: expected indices, got \['x'\]"),
    ({"lora_dropout": "x"}, r"lora_dropout: expected .* 0 <= p < 1, got 'x'"),
    ({"lora_dropout": 1.0}, r"lora_dropout: expected .* 0 <= p < 1, got 1\.0"),
    ({"target_modules": ["nothing"]}, "match nothing; linear layers of this model: q_proj, k_proj"),
    (
        {"target_modules": ["q_proj"], "layers_to_transform": [99]},
        r"\(with layers_to_transform\) match nothing; without layers_to_transform=\[99\] they would; linear",
    ),
    ({"target_modules": ["q_porj"]}, r"match nothing; did you mean 'q_proj'\? linear"),
    ({"target_modules": ["norm"]}, "target model.norm is a LlamaRMSNorm; only nn.Linear"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(fields) for fields, _ in REFUSED])
@pytest.mark.filterwarnings("ignore")
def test_refused_configs(fields: dict, message: str) -> None:
    model = llama()
    before = {key: type(module) for key, module in model.named_modules()}
    with pytest.raises(ValueError, match=f"adapter 'bad'.*{message}"):
        mx.convert_model(model, {"good": config(target_modules=["q_proj"]), "bad": config(**fields)})
    assert {key: type(module) for key, module in model.named_modules()} == before, "a refusal changes nothing"
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", ["", "a/b", "..", "a.b", "a\\b", "__base__"])
def test_refused_names(name: str) -> None:
    with pytest.raises(ValueError, match=f"adapter name.*{re.escape(name.replace(chr(92), chr(92) * 2))}"):
        mx.convert_model(llama(), {name: config()})


def test_a_config_without_a_name_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"expected configs by name, \{'a': LoraConfig\(\.\.\.\)\}, got LoraConfig"
    ):
        mx.convert_model(llama(), LoraConfig(r=4))


def test_refuses_second_conversion_and_unconverted_models() -> None:
    model = mx.convert_model(llama(), {"a": config()})
    with pytest.raises(ValueError, match=r"is already converted; use mlora_ext.add_adapter"):
        mx.convert_model(model, {"b": config()})
    with pytest.raises(ValueError, match="adapter 'a': the model already has an adapter of this name"):
        mx.add_adapter(model, "a", config())
    with pytest.raises(ValueError, match=r"has PEFT layers; use mlora_ext\.from_peft"):
        mx.convert_model(peft_model(llama(), {"a": config()}), {"b": config()})
    with pytest.raises(ValueError, match=r"expected one converted by mlora_ext.convert_model, got Llama"):
        mx.adapter_parameters(llama(), "a")


@pytest.mark.parametrize("where", ["convert_model", "every_linear", "add_adapter"])
def test_offloaded_layers_are_refused_before_anything_changes(where: str) -> None:
    model = llama()
    if where == "add_adapter":
        mx.convert_model(model, {"a": LoraConfig(r=2, target_modules=["k_proj"])})
    model.model.layers[1].self_attn.v_proj._hf_hook = object()
    before, state = [type(m) for m in model.modules()], dict(model.__dict__)
    flags = [p.requires_grad for p in model.parameters()]
    config = LoraConfig(r=2, target_modules=["o_proj" if where == "every_linear" else "v_proj"])
    change = {
        "convert_model": lambda: mx.convert_model(model, {"b": config}),
        "every_linear": lambda: mx.convert_model(model, {"b": config}, every_linear=True),
        "add_adapter": lambda: mx.add_adapter(model, "b", config),
    }
    with pytest.raises(ValueError, match=r"layer model\.layers\.1\.self_attn\.v_proj: is offloaded"):
        change[where]()
    assert [type(m) for m in model.modules()] == before
    assert model.__dict__ == state
    assert [p.requires_grad for p in model.parameters()] == flags


def test_every_field_of_loraconfig_is_judged() -> None:
    """A field that a newer PEFT adds is refused when it is set, not ignored."""
    from dataclasses import dataclass

    @dataclass
    class Newer(LoraConfig):
        shiny: bool = False

    from mlora_ext.adapters.lora_config import check_config

    with pytest.raises(ValueError, match=r"shiny=True is not supported"):
        check_config("a", Newer(shiny=True))
    with pytest.raises(ValueError, match=r"adapter 'a': expected a peft.LoraConfig, got Newer"):
        mx.convert_model(llama(), {"a": Newer()})


def test_a_users_module_may_have_a_name_like_a_bank() -> None:
    model = nn.Sequential(nn.ModuleDict({"lora_A_proj": nn.Linear(4, 4), "lora_B": nn.Linear(4, 4)}))
    targets = config(target_modules=["lora_A_proj", "lora_B"])
    mx.convert_model(model, {"a": targets})
    mx.add_adapter(model, "b", targets)
    for name in ("a", "b"):
        found = {key.rpartition(f".{name}.")[0] for key in mx.adapter_parameters(model, name)}
        assert found == {
            f"0.{layer}.{bank}" for layer in ("lora_A_proj", "lora_B") for bank in ("lora_A", "lora_B")
        }


@pytest.mark.parametrize("build", [llama, gpt2])
def test_every_linear_changes_libraries_not_values(build) -> None:
    """Layers without adapters use the chosen GEMM; the head stays, and they may get adapters later."""
    base = build().eval()
    few, every = copy.deepcopy(base), copy.deepcopy(base)
    mx.convert_model(few, {"one": config(target_modules=r".*0.*(q_proj|c_attn)")})
    mx.convert_model(every, {"one": config(target_modules=r".*0.*(q_proj|c_attn)")}, every_linear=True)
    replaced = [
        [key for key, module in model.named_modules() if isinstance(module, mx.MultiLoRALinear)]
        for model in (few, every)
    ]
    assert len(replaced[0]) == 1
    assert len(replaced[1]) > 4
    assert not any("head" in key for key in replaced[1])
    ids = token_ids(2, 5)
    grads = []
    for model in (few, every):
        embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
        model(inputs_embeds=embeddings).logits.square().sum().backward()
        grads.append(embeddings.grad)
    assert_same_up_to_rounding(grads[1], grads[0], "gradient of the embeddings")
    for model in (few, every):
        mx.add_adapter(model, "two", config(target_modules="all-linear", init_lora_weights=False))
    names = ["two", "one"]
    with torch.no_grad():
        logits = [model(input_ids=ids, adapter_names=names).logits for model in (few, every)]
    assert_same_up_to_rounding(logits[1], logits[0], "logits")
