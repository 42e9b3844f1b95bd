"""State of a PEFT model that from_peft carries over: the same logits and gradients as PEFT's afterwards."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import VOCABULARY, llama, norm_in_any_dtype, peft_model, token_ids
from peft import LoraConfig, PeftModel
from peft.helpers import rescale_adapter_scale
from peft.optimizers import create_lorafa_optimizer
from tolerances import assert_as_exact, assert_same_up_to_rounding, in_other_orders
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import mlora_ext as mx

CONFIGS = {
    "a": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    "b": LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], use_rslora=True),
}
NAMES = ["a", "b", "__base__", "a"]


@pytest.fixture(autouse=True)
def fp64_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_any_dtype)


def build() -> PeftModel:
    return peft_model(llama(), CONFIGS).eval()


def q_proj(model: nn.Module, layer: int = 1) -> Any:
    return model.base_model.model.model.layers[layer].self_attn.q_proj


def results(
    model: nn.Module, keys: list[str], prefix: str, weights: torch.Tensor, **inputs: Any
) -> list[torch.Tensor]:
    logits = model(**inputs).logits
    parameters = [model.get_parameter(prefix + key) for key in keys]
    return [logits.detach(), *torch.autograd.grad((logits * weights).sum(), parameters)]


def assert_same_as_before(peft: PeftModel) -> nn.Module:
    """Convert, and compare logits and all gradients with what PEFT gave; returns the converted model."""
    names = {"adapter_names": NAMES} if len(peft.peft_config) > 1 else {}
    inputs, weights = {"input_ids": token_ids(4, 6), **names}, torch.randn(4, 6, VOCABULARY)
    prefix = "base_model.model."
    keys = [key.removeprefix(prefix) for key, p in peft.named_parameters() if p.requires_grad]

    def theirs(model: nn.Module) -> list[torch.Tensor]:
        return results(model, keys, prefix, weights, **inputs)

    plain = in_other_orders(lambda: theirs(peft))
    oracle = theirs(copy.deepcopy(peft).double())
    model = mx.from_peft(peft)
    got = results(model, keys, "", weights, **inputs)
    for what, mine, draws, exact in zip(["logits", *keys], got, plain, oracle, strict=True):
        assert_as_exact(mine, draws, exact, what, of_a_model=True)
    return model


def set_scale(peft: PeftModel) -> None:
    """Of some layers only, and not by the same factor."""
    q_proj(peft, 0).set_scale("a", 0.25)
    q_proj(peft, 1).set_scale("a", 3)
    q_proj(peft, 1).set_scale("b", -0.5)


def set_every_scale(peft: PeftModel) -> None:
    for layer in peft.modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale("a", 0.3)


@pytest.mark.parametrize("change", [set_scale, set_every_scale])
def test_scalings(change: Callable[[PeftModel], None], tmp_path: Path) -> None:
    """And on through a folder, which PEFT loads with the same scalings."""
    base = llama()
    peft = peft_model(base, CONFIGS).eval()
    change(peft)
    model = assert_same_as_before(peft)
    ids = token_ids(2, 5)
    for name in "ab":
        mx.save_adapter(model, name, tmp_path / name)
        again = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / name).eval()
        with torch.no_grad():
            ours, theirs = model(input_ids=ids, adapter_names=[name] * 2), again(input_ids=ids)
            exact = copy.deepcopy(again).double()(input_ids=ids)
        assert_as_exact(ours.logits, theirs.logits, exact.logits, name, of_a_model=True)
        mx.load_adapter(model, name, tmp_path / name)


def test_one_factor_for_all_layers_is_one_alpha(tmp_path: Path) -> None:
    peft = build()
    set_every_scale(peft)
    mx.save_adapter(mx.from_peft(peft), "a", tmp_path / "a")
    stored = LoraConfig.from_pretrained(tmp_path / "a")
    assert stored.lora_alpha == pytest.approx(0.3 * 8)
    assert not stored.alpha_pattern


def test_rescale_adapter_scale() -> None:
    peft = build()
    with rescale_adapter_scale(peft, 0.4):
        assert_same_as_before(peft)


def test_frozen_a_of_lora_fa() -> None:
    peft = peft_model(llama(), {"a": CONFIGS["a"]}).eval()
    create_lorafa_optimizer(peft, r=4, lora_alpha=8, lr=1e-3)
    model = assert_same_as_before(peft)
    flags = {
        key.split(".lora_")[1][0]: p.requires_grad for key, p in mx.adapter_parameters(model, "a").items()
    }
    assert flags == {"A": False, "B": True}
    model(input_ids=token_ids(1, 5)).logits.sum().backward()
    grads = {key: p.grad for key, p in mx.adapter_parameters(model, "a").items()}
    assert all((grad is None) == (".lora_A." in key) for key, grad in grads.items())


def test_frozen_parts_in_a_mixed_batch() -> None:
    peft = build()
    frozen = ["layers.0.self_attn.q_proj.lora_A.a.weight", "layers.1.mlp.down_proj.lora_B.b.weight"]
    for key in frozen:
        peft.base_model.model.model.get_parameter(key).requires_grad_(False)
    model = assert_same_as_before(peft)
    model(input_ids=token_ids(4, 5), adapter_names=NAMES).logits.sum().backward()
    parameters = {k: p for name in "ab" for k, p in mx.adapter_parameters(model, name).items()}
    assert [key for key, p in parameters.items() if p.grad is None] == [f"model.{key}" for key in frozen]


@pytest.mark.parametrize("trainable", [False, True])
def test_inference_mode(trainable: bool, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    peft = PeftModel.from_pretrained(llama(), tmp_path / "a", "a", is_trainable=trainable)
    peft.load_adapter(tmp_path / "b", "b", is_trainable=trainable)
    model = mx.from_peft(peft)
    flags = {p.requires_grad for name in "ab" for p in mx.adapter_parameters(model, name).values()}
    assert flags == {trainable}


@pytest.mark.parametrize("frozen", [False, True])
def test_inference_mode_in_the_config_of_a_new_adapter(frozen: bool, tmp_path: Path) -> None:
    """Frozen, as by get_peft_model; a folder says it of every adapter, which may train when it is read."""
    config = LoraConfig(r=2, target_modules=["q_proj"], inference_mode=frozen)
    model = mx.convert_model(llama(), {"a": config})
    mx.add_adapter(model, "b", config)
    flags = {p.requires_grad for name in "ab" for p in mx.adapter_parameters(model, name).values()}
    assert flags == {not frozen}
    mx.save_adapter(model, "a", tmp_path)
    mx.load_adapter(model, "c", tmp_path)
    assert all(p.requires_grad for p in mx.adapter_parameters(model, "c").values())


def test_adapters_that_wait_in_peft_are_trained() -> None:
    """PEFT freezes all adapters but the active ones; here all are active, as far as nobody froze a part."""
    from peft import get_peft_model

    peft = get_peft_model(llama(), CONFIGS["a"], adapter_name="a")
    peft.add_adapter("b", CONFIGS["b"])
    assert not q_proj(peft).lora_A["b"].weight.requires_grad
    q_proj(peft).lora_A["a"].weight.requires_grad_(False)
    model = mx.from_peft(peft)
    assert all(p.requires_grad for p in mx.adapter_parameters(model, "b").values())
    frozen = [key for key, p in mx.adapter_parameters(model, "a").items() if not p.requires_grad]
    assert frozen == ["model.layers.1.self_attn.q_proj.lora_A.a.weight"]


def add_hooks(layer: nn.Module) -> list[Any]:
    """One of each kind, each of which changes values."""

    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
        return (args[0] * 1.5,), kwargs

    def after(module: nn.Module, args: tuple, kwargs: dict, y: torch.Tensor) -> torch.Tensor:
        return y.tanh() + args[0].mean(-1, keepdim=True)

    def gradient(module: nn.Module, dx: tuple, dy: tuple) -> tuple:
        return (dx[0] * 0.5,)

    def gradient_before(module: nn.Module, dy: tuple) -> tuple:
        return (dy[0] * 0.25,)

    return [
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_pre_hook(lambda _, args: (args[0] + 0.1,)),
        layer.register_forward_hook(after, with_kwargs=True),
        layer.register_forward_hook(lambda _, args, y: y + 0.2),
        layer.register_full_backward_hook(gradient),
        layer.register_full_backward_pre_hook(gradient_before),
    ]


@pytest.mark.parametrize("kind", range(6))
def test_hooks_on_pefts_layer(kind: int) -> None:
    peft, ids = build(), token_ids(2, 5)
    before = peft.base_model.model(input_ids=ids).logits
    handles = add_hooks(q_proj(peft))
    for index, handle in enumerate(handles):
        if index != kind:
            handle.remove()
    if kind < 4:
        changed = peft.base_model.model(input_ids=ids).logits
        assert not torch.allclose(changed, before, atol=1e-2), "the hook does nothing"
    model = assert_same_as_before(peft)
    layer = model.model.layers[1].self_attn.q_proj
    handles[kind].remove()
    fields = [field for field in vars(layer) if field.endswith(("hooks", "kwargs"))]
    assert not any(getattr(layer, field) for field in fields), "a handle removes its hook"


def test_all_hooks_on_pefts_layer_at_once() -> None:
    peft = build()
    add_hooks(q_proj(peft))
    assert_same_as_before(peft)


@pytest.mark.filterwarnings("ignore:.*dropouts of the base model")
def test_training_mode_of_dropouts() -> None:
    """PEFT's new layers are in training mode in a base in evaluation mode, and drop."""
    from peft import get_peft_model

    config = LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
    ids = token_ids(2, 6)
    for trains in (True, False):
        peft = get_peft_model(llama().eval(), config)
        if not trains:
            peft.eval()
        theirs = [peft(input_ids=ids).logits for _ in range(2)]
        model = mx.from_peft(peft)
        ours = [model(input_ids=ids).logits for _ in range(2)]
        for pair in (theirs, ours):
            assert torch.allclose(*pair, atol=1e-4) != trains
        assert not model.model.layers[0].training


def test_changed_dropout(tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5)
    peft = peft_model(llama(), {"a": config})
    for module in peft.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model = assert_same_as_before(peft.train())
    mx.save_adapter(model, "a", tmp_path / "a")
    assert LoraConfig.from_pretrained(tmp_path / "a").lora_dropout == 0


@pytest.mark.parametrize(
    ("base", "adapters", "expected"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
    ],
)
def test_no_weight_is_rounded(base: torch.dtype, adapters: torch.dtype, expected: torch.dtype) -> None:
    peft = peft_model(llama().to(base), {"a": LoraConfig(r=4, target_modules=["q_proj"])})
    state = {key: p for key, p in peft.named_parameters() if "lora_" in key}
    for parameter in state.values():
        parameter.data = parameter.data.to(adapters)
    model = mx.from_peft(peft)
    for key, parameter in mx.adapter_parameters(model, "a").items():
        assert parameter.dtype == expected
        assert torch.equal(parameter.double(), state[f"base_model.model.{key}"].double())


def test_dropouts_decide_the_mode_of_a_layer() -> None:
    """PEFT drops by the mode of a layer's dropouts, whatever the layer's own is."""
    peft = peft_model(llama(), {"a": CONFIGS["a"]}).train()
    for module in peft.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    ids = token_ids(2, 5)
    expected = peft(input_ids=ids).logits.detach()
    model = mx.from_peft(peft)
    assert_same_up_to_rounding(model(input_ids=ids).logits.detach(), expected, "logits")


def test_a_failure_puts_pefts_layers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    peft, ids = build(), token_ids(2, 5)
    expected = peft(input_ids=ids).logits

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("mlora_ext.convert.peft_model.check_weights", fail)
    with pytest.raises(RuntimeError, match="broken"):
        mx.from_peft(peft)
    assert torch.equal(peft(input_ids=ids).logits, expected)
