"""Adapters on experts and routers in mixed batches, against PEFT's `target_parameters`."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import MIXTURES, QUERIES, VOCABULARY, mixture
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

import mlora_ext as mx
from mlora_ext.layers.experts import MultiLoRAExperts
from mlora_ext.layers.parameter_layer import MultiLoRAMatrix

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
QUICK = [
    one if one in ("gpt_oss", "llama4", "mixtral") else pytest.param(one, marks=pytest.mark.nightly)
    for one in MIXTURES
]
NO_LAYERS = {"llama4": ["router"]}
"""Linear layers that return a tuple, on which PEFT fails."""
NAMES = ["experts", "all", "__base__", "attention", "down", "experts"]


def configs(family: str, **changes: Any) -> dict[str, LoraConfig]:
    fields: dict[str, dict[str, Any]] = {
        "experts": {"r": 3, "lora_alpha": 6, "target_modules": [], "target_parameters": EXPERTS},
        "all": {"r": 2, "target_modules": "all-linear", "exclude_modules": NO_LAYERS.get(family)},
        "attention": {"r": 4, "target_modules": [QUERIES.get(family, "q_proj"), "o_proj"]},
        "down": {"r": 5, "use_rslora": True, "target_modules": [], "target_parameters": ["down_proj"]},
    }
    return {name: LoraConfig(**own, init_lora_weights=False, **changes) for name, own in fields.items()}


def converted(family: str, **changes: Any) -> nn.Module:
    return mx.convert_model(mixture(family), configs(family, **changes), seed=7)


def tokens(count: int = len(NAMES)) -> Tensor:
    return torch.randint(3, VOCABULARY, (count, 7))


def rows_of(name: str) -> list[int]:
    return [row for row, other in enumerate(NAMES) if other == name]


@pytest.mark.parametrize("family", QUICK)
def test_a_mixed_batch_equals_peft_with_each_adapter_alone(family: str, tmp_path: Path) -> None:
    """Logits, gradients, folders both ways, `from_peft` and merging."""
    model, ids = converted(family), tokens()
    out = model(input_ids=ids, adapter_names=NAMES).logits
    out.square().sum().backward()
    assert_close(out[rows_of("__base__")], mixture(family)(input_ids=ids[rows_of("__base__")]).logits)
    for name in configs(family):
        rows = rows_of(name)
        mx.save_adapter(model, name, tmp_path / name)
        peft = PeftModel.from_pretrained(mixture(family), tmp_path / name, is_trainable=True)
        theirs = peft(input_ids=ids[rows]).logits
        assert_close(out[rows], theirs)
        theirs.square().sum().backward()
        peft.save_pretrained(tmp_path / f"{name}-peft")
        again = mixture(family)
        mx.load_adapter(again, name, tmp_path / f"{name}-peft")
        assert_close(again(input_ids=ids[rows]).logits, theirs)
        merged = mx.merge_and_unload(model, name)
        assert not any(isinstance(module, MultiLoRAExperts | MultiLoRAMatrix) for module in merged.modules())
        assert_close(merged(input_ids=ids[rows]).logits, theirs)
        expected = [p.grad for key, p in peft.named_parameters() if "lora_" in key]
        taken = mx.from_peft(peft)
        assert_close(taken(input_ids=ids[rows]).logits, theirs)
        assert_same_gradients(mx.adapter_parameters(model, name), expected)


def assert_close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def assert_same_gradients(parameters: dict[str, nn.Parameter], expected: list[Tensor | None]) -> None:
    """As sets: PEFT names and orders them by its wrappers; the test of folders holds the names."""
    assert len(parameters) == len(expected)
    mine = sorted(float(p.grad.double().norm()) for p in parameters.values() if p.grad is not None)
    theirs = sorted(float(grad.double().norm()) for grad in expected if grad is not None)
    assert mine == pytest.approx(theirs, rel=1e-4)
    assert mine[0] > 0


def test_sixteen_adapters_over_128_small_experts() -> None:
    """Every adapter as alone; launches and gradients are of one call per projection and direction."""
    torch.manual_seed(3)
    model = mixture("qwen3_moe", num_experts=128, num_experts_per_tok=8, moe_intermediate_size=8)
    names = [f"a{index}" for index in range(16)]
    fields = {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "init_lora_weights": False}
    all_configs = {name: LoraConfig(r=1 + index % 4, **fields) for index, name in enumerate(names)}
    ids = torch.randint(3, VOCABULARY, (16, 12))
    together = mx.convert_model(copy.deepcopy(model), all_configs, seed=1)
    out = together(input_ids=ids, adapter_names=names).logits
    out.square().sum().backward()
    for place in (0, 6, 15):
        name = names[place]
        peft = get_peft_model(copy.deepcopy(model), copy.deepcopy(all_configs[name]))
        own = mx.adapter_parameters(together, name)
        put_into(peft, own)
        theirs = peft(input_ids=ids[place : place + 1]).logits
        theirs.square().sum().backward()
        assert_close(out[place], theirs[0])
        assert_same_gradients(own, [p.grad for key, p in peft.named_parameters() if "lora_" in key])


def put_into(peft: nn.Module, own: dict[str, nn.Parameter]) -> None:
    """Copies an adapter of experts into PEFT's wrappers, whose inner one is that of `gate_up_proj`."""
    state = peft.state_dict()
    for key, parameter in own.items():
        layer, part, _, _ = key.rsplit(".", 3)
        inner = ".base_layer" if part.startswith("gate_up") else ""
        with torch.no_grad():
            state[f"base_model.model.{layer}{inner}.lora_{part[-1]}.default.weight"].copy_(parameter)


@pytest.mark.parametrize(
    "family", ["gpt_oss", "llama4", pytest.param("qwen3_moe", marks=pytest.mark.nightly)]
)
def test_checkpointing_and_copies(family: str) -> None:
    model, ids = converted(family), tokens()
    model.train()
    copied = copy.deepcopy(model)
    copied.gradient_checkpointing_enable()
    for one in (model, copied):
        one(input_ids=ids, adapter_names=NAMES).logits.square().mean().backward()
    found = dict(copied.named_parameters())
    graded = [key for key, p in model.named_parameters() if p.grad is not None]
    assert graded
    for key in graded:
        torch.testing.assert_close(found[key].grad, model.get_parameter(key).grad)
    model.eval()
    out = model(input_ids=ids, adapter_names=NAMES).logits
    assert set(mixture(family).state_dict()) <= set(model.state_dict())
    other = converted(family)
    other.load_state_dict(model.state_dict())
    mx.remove_adapter(other, "experts")
    kept = [row for row, name in enumerate(NAMES) if name != "experts"]
    left = other.eval()(input_ids=ids[kept], adapter_names=[NAMES[row] for row in kept]).logits
    assert_close(left, out[kept])


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_half_precision(family: str) -> None:
    """Of the experts alone: a model's router may choose others after rounding."""
    model = converted(family)
    x, index = torch.randn(12, 32), torch.stack([torch.randperm(4)[:2] for _ in range(12)])
    weights, layout = torch.rand(12, 2), mx.SegmentLayout.from_lengths([5, 3, 4], adapters=[0, -1, 1])

    def run(model: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
        with mx.route(model, layout, names=["down", "experts"]):
            return model.model.layers[0].mlp.experts(x, index, weights)

    with torch.no_grad():
        expected = run(model, x, weights)
        with torch.autocast("cpu", torch.bfloat16):
            automatic = run(model, x, weights)
        half = run(copy.deepcopy(model).to(torch.bfloat16), x.bfloat16(), weights.bfloat16())
    for found in (automatic, half):
        assert (found - expected).abs().max() <= 0.05 * expected.abs().max()


def test_generate_goes_on_with_each_prompts_adapter() -> None:
    model, ids = converted("mixtral").eval(), tokens()
    options = {
        "max_new_tokens": 4,
        "min_new_tokens": 4,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
    }
    found = model.generate(input_ids=ids, adapter_names=NAMES, **options)
    for name in ("experts", "all", "down"):
        rows = rows_of(name)
        options["attention_mask"] = torch.ones_like(ids[rows])
        alone = model.generate(input_ids=ids[rows], adapter_names=[name] * len(rows), **options)
        assert torch.equal(found[rows], alone), name


def test_an_adapter_that_is_not_a_number_stays_alone() -> None:
    model, ids = converted("qwen3_moe"), tokens()
    out = model(input_ids=ids, adapter_names=NAMES).logits
    with torch.no_grad():
        for parameter in mx.adapter_parameters(model, "all").values():
            parameter.fill_(torch.nan)
    broken = model(input_ids=ids, adapter_names=NAMES).logits
    broken.square().nan_to_num().sum().backward()
    others = [row for row, name in enumerate(NAMES) if name != "all"]
    assert broken[rows_of("all")].isnan().all()
    assert_close(broken[others], out[others])
    for name in ("experts", "attention", "down"):
        for parameter in mx.adapter_parameters(model, name).values():
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("family", ["gpt_oss", "llama4"])
def test_without_adapters_the_modules_own_forward_runs(family: str) -> None:
    model, base, ids = converted(family), mixture(family), tokens()
    with mx.disable_adapter(model):
        assert torch.equal(model(input_ids=ids).logits, base(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("mixtral", {"target_parameters": EXPERTS, "lora_dropout": 0.1}, "PEFT serves no lora_dropout"),
        ("mixtral", {"target_parameters": ["experts.w1"]}, r"\['experts.w1'\] match no parameter"),
        ("gpt_oss", {"target_parameters": ["gate_up_proj_bias"]}, "can be put on gate_up_proj and down_proj"),
        ("mixtral", {"target_parameters": ["norm.weight"]}, "belongs to a MixtralRMSNorm.*not supported"),
        ("mixtral", {"target_parameters": ["embed_tokens.weight"]}, "belongs to a Embedding.*not supported"),
        (
            "mixtral",
            {"target_parameters": EXPERTS, "init_lora_weights": "pissa"},
            "Experts, which serves plain.* has init_lora_weights='pissa'; leave the layer out of its",
        ),
        (
            "mixtral",
            {"target_modules": "all-linear", "init_lora_weights": "olora"},
            "Router, which serves plain LoRA only, and this adapter has init_lora_weights='olora'",
        ),
        (
            "mixtral",
            {"target_modules": "all-linear", "init_lora_weights": "orthogonal"},
            "is a parameter, on which init_lora_weights='orthogonal' is not supported",
        ),
        (
            "mixtral",
            {"target_parameters": ["experts.gate_upproj", "gate.wait"]},
            r"match no parameter of this model; did you mean 'experts.gate_up_proj', 'gate.weight'\?",
        ),
        (
            "mixtral",
            {"target_modules": "all_linear"},
            "match nothing; did you mean 'all-linear'. linear",
        ),
        ("mixtral", {"target_modules": ["all-linear"]}, "did you mean 'all-linear', not in a list"),
        ("mixtral", {"target_parameters": [3]}, r"target_parameters: expected a list of names, got \[3\]"),
        ("mixtral", {"target_modules": ["q_proj"], "target_parameters": ["q_proj.weight"]}, "keep one"),
        ("mixtral", {"target_modules": ["w1"]}, "w1 without also targeting w3"),
    ],
)
def test_refused_by_name(family: str, fields: dict[str, Any], message: str) -> None:
    model = mixture(family)
    with pytest.raises(ValueError, match=f"adapter 'a': .*{message}"):
        mx.convert_model(model, {"a": LoraConfig(**{"target_modules": [], **fields})})
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_matrix_that_is_used_otherwise_is_refused_when_it_runs() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.table.t()

    config = LoraConfig(r=2, target_modules=[], target_parameters=["0.table"])
    model = mx.convert_model(nn.Sequential(Scores()), {"a": config})
    with pytest.raises(ValueError, match=r"layer 0\.table: .*the module calls t on it; remove it"):
        model(torch.randn(3, 6))


def test_a_router_may_lose_its_adapters_and_get_others() -> None:
    model, ids = mixture("mixtral"), tokens(2)
    config = LoraConfig(r=2, target_modules=[], target_parameters=["gate.weight"], init_lora_weights=False)
    plain = model(input_ids=ids).logits
    mx.convert_model(model, {"a": config})
    changed = model(input_ids=ids).logits
    mx.remove_adapter(model, "a")
    assert_close(model(input_ids=ids).logits, plain)
    mx.add_adapter(model, "a", config)
    assert_close(model(input_ids=ids).logits, changed)


def test_a_linear_layers_weight_is_the_layer(tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=[], target_parameters=["q_proj.weight"], init_lora_weights=False)
    model, ids = mx.convert_model(mixture("mixtral"), {"a": config}), tokens(2)
    assert isinstance(model.model.layers[0].self_attn.q_proj, mx.MultiLoRALinear)
    mx.save_adapter(model, "a", tmp_path)
    peft = PeftModel.from_pretrained(mixture("mixtral"), tmp_path)
    assert_close(peft(input_ids=ids).logits, model(input_ids=ids).logits)
    assert_close(mx.from_peft(peft)(input_ids=ids).logits, model(input_ids=ids).logits)


class Two(nn.Linear):
    """A linear layer with a second matrix and a scale."""

    def __init__(self) -> None:
        super().__init__(6, 8)
        self.second, self.scale = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(super().forward(x), self.second) * self.scale


def test_several_parameters_of_one_module_are_pefts(tmp_path: Path) -> None:
    """Adapters on the weight, the second matrix, and both with scalings of their own, in one batch."""
    targets = {"a": ["0.weight"], "b": ["0.second"], "c": ["0.weight", "0.second"]}
    fields: dict[str, Any] = {"target_modules": [], "init_lora_weights": False, "rank_pattern": {"second": 3}}
    configs = {name: LoraConfig(r=2, target_parameters=own, **fields) for name, own in targets.items()}
    base, x = nn.Sequential(Two()), torch.randn(8, 6)
    model = mx.convert_model(copy.deepcopy(base), configs)
    with mx.route(model, mx.SegmentLayout.from_lengths([2, 2, 2, 2], [0, 1, 2, -1]), list("abc")):
        y = model(x)
    y.square().sum().backward()
    assert_close(y[6:], base(x[6:]))
    for place, name in enumerate("abc"):
        mx.save_adapter(model, name, tmp_path / name)
        peft = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / name, is_trainable=True)
        theirs = peft(x[2 * place : 2 * place + 2])
        assert_close(y[2 * place : 2 * place + 2], theirs)
        theirs.square().sum().backward()
        expected = [p.grad for key, p in peft.named_parameters() if "lora_" in key]
        assert_same_gradients(mx.adapter_parameters(model, name), expected)
        assert_close(mx.from_peft(peft)(x), mx.merge_and_unload(model, name)(x))


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_experts_converted_in_inference_mode(family: str) -> None:
    with torch.inference_mode():
        found = converted(family)(input_ids=(ids := tokens()), adapter_names=NAMES).logits
    assert_close(found, converted(family)(input_ids=ids.clone(), adapter_names=NAMES).logits)
