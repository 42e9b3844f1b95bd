"""merge_and_unload: PEFT's numbers, in a plain copy."""

import copy
import dataclasses

import pytest
import torch
from models import CONFIGS, copy_weights, gpt2, llama, peft_model, token_ids
from peft import LoraConfig
from tolerances import assert_same_up_to_rounding
from torch import nn
from transformers.pytorch_utils import Conv1D

import mlora_ext as mx
from mlora_ext import MultiLoRALinear

GPT2 = {
    "a": LoraConfig(r=3, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, use_rslora=True),
    "b": LoraConfig(r=3, target_modules=["c_proj"], fan_in_fan_out=True, init_lora_weights=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_weights_are_pefts_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    base, configs = (llama(), CONFIGS) if family == "llama" else (gpt2(), GPT2)
    base = base.to(dtype)
    theirs = peft_model(base, configs)
    model = mx.convert_model(copy.deepcopy(base), configs)
    copy_weights(theirs, model, configs)
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(7)
    expected_draw = torch.rand(3)
    torch.manual_seed(7)
    merged = mx.merge_and_unload(model, "a")
    assert torch.equal(torch.rand(3), expected_draw), "merging draws no random numbers"
    expected = theirs.merge_and_unload(adapter_names=["a"]).state_dict()
    assert merged.state_dict().keys() == expected.keys() == base.state_dict().keys()
    for key, value in merged.state_dict().items():
        assert torch.equal(value, expected[key]), key
        assert value.dtype == dtype
    assert any(not torch.equal(expected[key], value) for key, value in base.state_dict().items())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    memory = {parameter.data_ptr() for parameter in model.parameters()}
    assert not memory & {parameter.data_ptr() for parameter in merged.parameters()}
    assert {type(m) for m in merged.modules()} == {type(m) for m in base.modules()}


def test_the_layers_own_scaling_counts_and_not_that_of_the_config() -> None:
    model = mx.convert_model(llama(), {"a": CONFIGS["a"]})
    layer = model.model.layers[1].self_attn.q_proj
    layer.specs["a"] = dataclasses.replace(layer.specs["a"], scaling=3.0)
    merged = mx.merge_and_unload(model).model.layers[1].self_attn.q_proj.weight
    change = layer.lora_B.parameter_of("a") @ layer.lora_A.parameter_of("a")
    assert_same_up_to_rounding(merged, layer.weight + 3 * change, "merged weight")


def test_the_copy_is_a_plain_model() -> None:
    base = llama()
    model = mx.convert_model(copy.deepcopy(base), {"a": CONFIGS["a"]}).eval()
    merged = model.merge_and_unload()
    ids = token_ids(2, 5)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    own = set(merged.__dict__) - set(base.__dict__)
    assert not own, f"left on the copy: {own}"
    for kind in (
        "_forward_pre_hooks",
        "_forward_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    ):
        assert not getattr(merged, kind), kind
    mx.convert_model(merged, {"next": CONFIGS["b"]})


def test_what_a_trainer_puts_on_the_instance_stays_behind() -> None:
    model = mx.convert_model(llama(), {"a": CONFIGS["a"]}).eval()
    own = model.forward
    model.forward = lambda *args, **named: own(*args, **named)
    merged = mx.merge_and_unload(model)
    del model.forward
    ids = token_ids(1, 4)
    with torch.no_grad():
        before = merged(input_ids=ids).logits
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(merged(input_ids=ids).logits, before)


def test_lists_of_hooks_on_the_model_are_no_obstacle() -> None:
    """Transformers keeps the handles of `enable_input_require_grads` in one; TRL calls it."""
    model = mx.convert_model(llama(), {"a": CONFIGS["a"]}).eval()
    model.enable_input_require_grads()
    ids = token_ids(2, 7)
    assert_same_up_to_rounding(mx.merge_and_unload(model)(ids).logits, model(ids).logits, "logits")


def test_the_adapter_is_named_or_known() -> None:
    model = mx.convert_model(llama(), CONFIGS)
    with pytest.raises(ValueError, match=r"expected one of the model's adapters \(a, b\), got None"):
        mx.merge_and_unload(model)
    with pytest.raises(ValueError, match="no adapter 'x'"):
        mx.merge_and_unload(model, "x")
    model.set_adapter("b")
    first, second = mx.merge_and_unload(model), mx.merge_and_unload(model, "b")
    assert all(torch.equal(x, y) for x, y in zip(first.parameters(), second.parameters(), strict=True))


def test_tied_weights_are_refused() -> None:
    model = gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    mx.convert_model(model, {"a": LoraConfig(r=2, target_modules=["lm_head"])})
    with pytest.raises(ValueError, match=r"lm_head: its weight is tied to transformer\.wte\.weight"):
        mx.merge_and_unload(model)


def test_a_module_of_nobodys_family() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 6, bias=False), Conv1D(5, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x).relu())

    base = Mixed()
    config = LoraConfig(r=2, target_modules=["one", "two"], init_lora_weights=False)
    model = mx.convert_model(copy.deepcopy(base), {"a": config})
    seen: list[str] = []
    model.one.register_forward_hook(lambda *_: seen.append("one"))
    merged = mx.merge_and_unload(model)
    x = torch.randn(4, 8)
    torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-5)
    assert seen == ["one", "one"], "hooks of the user's come along"
    assert not any(isinstance(module, MultiLoRALinear) for module in merged.modules())
    assert not torch.allclose(merged(x), base(x), rtol=1e-4, atol=1e-5)


def test_safe_merge_refuses_what_is_not_finite() -> None:
    model = mx.convert_model(llama(), {"a": CONFIGS["a"]})
    with torch.no_grad():
        next(iter(mx.adapter_parameters(model, "a").values())).fill_(float("inf"))
    with pytest.raises(ValueError, match="NaN"):
        mx.merge_and_unload(model, safe_merge=True)
