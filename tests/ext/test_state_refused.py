"""State that a conversion would lose is refused by name, and the model is as it was then."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import llama, peft_model, token_ids
from peft import LoraConfig
from peft.helpers import update_forward_signature
from peft.tuners.lora import Linear as PeftLinear
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm
from torch.testing._internal.two_tensor import TwoTensor

import mlora_ext as mx

KEY = r"layer model\.layers\.1\.self_attn\.q_proj"
Q_PROJ = LoraConfig(r=4, target_modules=["q_proj"])


def q_proj(model: nn.Module) -> Any:
    return model.get_submodule("model.layers.1.self_attn.q_proj")


def double(module: nn.Module, args: tuple, y: torch.Tensor) -> torch.Tensor:
    return y * 2


def replace_forward(module: nn.Module) -> None:
    own = module.forward
    module.forward = lambda x: own(x) * 2


def hold_in_int8(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.mul(9).to(torch.int8), requires_grad=False)


def hold_in_two(layer: nn.Linear) -> None:
    """A class over others' memory, as torchao's int8 and float8 tensors are."""
    weight = layer.weight.detach()
    layer.weight = nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=layer.weight.requires_grad)


LAYERS: dict[str, tuple[Callable[[Any], object], str]] = {
    "forward hook": (lambda m: m.register_forward_hook(double), "has forward hooks, which"),
    "pre hook": (
        lambda m: m.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
        "has forward pre hooks, .* and register them on the converted model",
    ),
    "backward hook": (lambda m: m.register_full_backward_hook(lambda *_: None), "has backward hooks"),
    "backward pre hook": (
        lambda m: m.register_full_backward_pre_hook(lambda *_: None),
        "has backward pre hooks",
    ),
    "state dict hook": (lambda m: m.register_state_dict_pre_hook(print), "has state dict pre hooks"),
    "forward": (replace_forward, "its forward was replaced on the instance, .* delete the attribute"),
    "compiled": (lambda m: m.compile(backend="eager"), "is compiled, .* compile the converted model"),
    "pruned": (lambda m: prune.random_unstructured(m, "weight", 0.3), "has forward pre hooks"),
    "another class": (hold_in_two, "expected a plain floating-point weight, got TwoTensor of torch"),
    "int8": (hold_in_int8, r"expected a plain floating-point weight, got Tensor of torch\.int8; quantized"),
}


def of_plain(change: Callable[[Any], object]) -> tuple[nn.Module, Callable[[], object]]:
    model = llama().eval()
    change(q_proj(model))
    return model, lambda: mx.convert_model(model, {"a": Q_PROJ})


def of_every_linear(change: Callable[[Any], object]) -> tuple[nn.Module, Callable[[], object]]:
    model = llama().eval()
    change(q_proj(model))
    config = LoraConfig(r=4, target_modules=["k_proj"])
    return model, lambda: mx.convert_model(model, {"a": config}, every_linear=True)


def of_converted(change: Callable[[Any], object]) -> tuple[nn.Module, Callable[[], object]]:
    model = mx.convert_model(llama().eval(), {"b": LoraConfig(r=4, target_modules=["k_proj"])})
    change(q_proj(model))
    return model, lambda: mx.add_adapter(model, "a", Q_PROJ)


def of_peft_base(change: Callable[[Any], object]) -> tuple[nn.Module, Callable[[], object]]:
    peft = peft_model(llama(), {"a": Q_PROJ}).eval()
    change(q_proj(peft.base_model.model).base_layer)
    return peft, lambda: mx.from_peft(peft)


def assert_refused(model: nn.Module, convert: Callable[[], object], message: str) -> None:
    ids, ints = token_ids(2, 5), any(p.dtype == torch.int8 for p in model.parameters())

    def seen() -> tuple[Any, ...]:
        with torch.no_grad():
            logits = torch.zeros(1) if ints else model(input_ids=ids).logits
        modules = {key: id(module) for key, module in model.named_modules()}
        fields = {key: sorted(vars(module)) for key, module in model.named_modules()}
        return modules, fields, [p.requires_grad for p in model.parameters()], logits

    before = seen()
    with pytest.raises(ValueError, match=message):
        convert()
    assert seen()[:-1] == before[:-1]
    assert torch.equal(seen()[-1], before[-1])


@pytest.mark.parametrize("how", [of_plain, of_every_linear, of_converted, of_peft_base])
@pytest.mark.parametrize("what", LAYERS)
def test_layers(what: str, how: Callable[..., Any]) -> None:
    change, message = LAYERS[what]
    model, convert = how(change)
    assert_refused(model, convert, f"^{KEY}: {message}")


@pytest.mark.parametrize("norm", [weight_norm, parametrizations.orthogonal])
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_weights_that_are_computed(norm: Callable[[nn.Module], nn.Module]) -> None:
    """They are no parameters: nothing could be frozen and used in their place."""
    model = llama().eval()
    norm(q_proj(model))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.q_proj"):
        mx.convert_model(model, {"a": Q_PROJ})
    assert all(parameter.requires_grad for parameter in model.parameters())


class Custom(PeftLinear):
    """A LoRA layer of a user's own."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return something else than LoRA."""
        return super().forward(x, *args, **kwargs) * 2


def custom() -> LoraConfig:
    config = LoraConfig(r=4, target_modules=["q_proj"])
    config._register_custom_module({nn.Linear: Custom})
    return config


def test_custom_modules() -> None:
    message = r"adapter 'a': _register_custom_module \(Custom\) is not supported"
    with pytest.raises(ValueError, match=message):
        mx.convert_model(llama(), {"a": custom()})
    peft = peft_model(llama(), {"a": custom()}).eval()
    assert_refused(peft, lambda: mx.from_peft(peft), message)
    peft.peft_config["a"]._custom_modules = None
    assert_refused(
        peft, lambda: mx.from_peft(peft), f"{KEY.replace('1', '0')}: expected LoRA or DoRA .* Custom"
    )


def inactive(peft: Any) -> None:
    peft.base_model.set_adapter([])


def half_in_training(peft: Any) -> None:
    peft.add_adapter("b", LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.5))


def other_dropout(peft: Any) -> None:
    q_proj(peft.base_model.model).lora_dropout["a"].p = 0.1


def within(part: str) -> Callable[[Any], object]:
    return lambda peft: q_proj(peft.base_model.model).get_submodule(part).register_forward_hook(double)


def trained(part: str) -> Callable[[Any], object]:
    return lambda peft: peft.base_model.model.get_parameter(part).requires_grad_(True)


def double_a(peft: Any) -> None:
    peft.base_model.model.get_submodule("model.layers.1.self_attn.q_proj.lora_A.a").double()


def hook_gradient(peft: Any) -> None:
    q_proj(peft.base_model.model).lora_B["a"].weight.register_hook(lambda gradient: gradient * 2)


PEFT: dict[str, tuple[Callable[[Any], object], str]] = {
    "disabled": (
        lambda peft: peft.base_model.disable_adapter_layers(),
        r"adapters of model\.layers\.0\.self_attn\.q_proj are disabled; call enable_adapter_layers\(\)",
    ),
    "inactive": (inactive, r"adapter 'a' is not active in model\.layers\.0.*; call set_adapter\('a'\)"),
    "half in training": (
        half_in_training,
        r"some dropouts of model\.layers\.0.* are in training mode and so",
    ),
    "other dropout": (other_dropout, r"adapter 'a': its layers have lora_dropout of 0\.1, 0\.5"),
    "forward of PEFT's layer": (lambda p: replace_forward(q_proj(p.base_model.model)), f"{KEY}: its forward"),
    "hook on lora_A": (within("lora_A.a"), rf"{KEY}\.lora_A\.a: has forward hooks"),
    "hook on dropout": (within("lora_dropout.a"), rf"{KEY}\.lora_dropout\.a: has forward hooks"),
    "hook on a gradient": (hook_gradient, rf"{KEY}\.lora_B\.a: its weight has hooks on its gradient"),
    "fp64 adapter": (double_a, rf"{KEY}\.lora_A\.a: is fp64 on a base of torch\.float32"),
    "hook on the model": (
        lambda peft: peft.register_forward_hook(lambda *_: None),
        "peft_model: has forward",
    ),
    "hook on LoraModel": (
        lambda peft: peft.base_model.register_forward_hook(lambda *_: None),
        "peft_model: its LoraModel: has forward hooks",
    ),
    "forward of the model": (replace_forward, "peft_model: its forward"),
    "trained norm": (
        trained("model.norm.weight"),
        r"model\.norm\.weight of the base requires a gradient, .* call requires_grad_\(False\) on it",
    ),
    "trained target": (
        trained("model.layers.1.self_attn.q_proj.base_layer.weight"),
        r"model\.layers\.1\.self_attn\.q_proj\.weight of the base requires a gradient",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", PEFT)
def test_peft_models(what: str) -> None:
    change, message = PEFT[what]
    peft = peft_model(llama(), {"a": LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.5)}).eval()
    change(peft)
    if what in ("half in training", "fp64 adapter", "forward of the model"):
        with pytest.raises(ValueError, match=message):
            mx.from_peft(peft)
        assert q_proj(peft.base_model.model).lora_A["a"].weight.requires_grad
    else:
        assert_refused(peft, lambda: mx.from_peft(peft), message)


def test_what_peft_itself_puts_on_instances_is_no_patch() -> None:
    peft = peft_model(llama(), {"a": Q_PROJ})
    update_forward_signature(peft)
    assert "forward" in vars(peft)
    mx.from_peft(peft)


def test_a_generate_of_the_instance() -> None:
    model = llama()
    model.generate = lambda *_: None
    assert_refused(
        model, lambda: mx.convert_model(model, {"a": Q_PROJ}), "model: its `generate` was replaced"
    )
    peft = peft_model(llama(), {"a": Q_PROJ}).eval()
    peft.base_model.model.generate = lambda *_: None
    assert_refused(peft, lambda: mx.from_peft(peft), "model: its `generate` was replaced")


@pytest.mark.parametrize("where", ["q_proj", "k_proj"])
def test_base_weights_unfrozen_after_conversion(where: str) -> None:
    model = mx.convert_model(llama(), {"b": LoraConfig(r=4, target_modules=["k_proj"])})
    model.get_parameter(f"model.layers.1.self_attn.{where}.weight").requires_grad_(True)
    config = LoraConfig(r=4, target_modules=[where])
    message = (
        rf"layer model\.layers\.1\.self_attn\.{where}: its weight requires a gradient, .* or target other"
    )
    assert_refused(model, lambda: mx.add_adapter(model, "a", config), message)
