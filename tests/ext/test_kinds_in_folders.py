"""Kinds of adapters and quantised bases in PEFT's folders."""

import copy
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import gpt2, llama, token_ids
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from tolerances import assert_same_up_to_rounding
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

import mlora_ext as mx

FIELDS: dict[str, dict[str, Any]] = {"dora": {"use_dora": True}, "bias": {"lora_bias": True}}
KINDS = pytest.mark.parametrize("kind", FIELDS)
IDS = token_ids(2, 6)


def config(kind: str, **fields: Any) -> LoraConfig:
    fixed = {"r": 4, "lora_alpha": 7, "fan_in_fan_out": True, "init_lora_weights": False}
    return LoraConfig(**fixed, **FIELDS[kind], target_modules=["c_attn", "c_proj"], **fields)


def logits(model: nn.Module, **names: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, **names).logits


def shaken(model: nn.Module) -> nn.Module:
    """With other numbers in every Parameter, as after training."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.add_(torch.rand_like(parameter), alpha=0.3)
    return model


@KINDS
def test_a_folder_of_ours_in_peft(kind: str, tmp_path: Path) -> None:
    base = gpt2()
    model = shaken(mx.convert_model(copy.deepcopy(base), {"a": config(kind), "b": config("dora")})).eval()
    mx.save_adapter(model, "a", tmp_path)
    theirs = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    mine = logits(model, adapter_names=["a"] * 2)
    assert_same_up_to_rounding(logits(theirs), mine, "logits")
    theirs.save_pretrained(tmp_path / "again")
    one, other = (load_file(f / "adapter_model.safetensors") for f in (tmp_path, tmp_path / "again"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert (tmp_path / "again" / "adapter_config.json").is_file()


@KINDS
def test_a_folder_of_pefts_here(kind: str, tmp_path: Path) -> None:
    base = gpt2()
    theirs = shaken(get_peft_model(copy.deepcopy(base), config(kind))).eval()
    theirs.save_pretrained(tmp_path)
    model = copy.deepcopy(base).eval()
    mx.load_adapter(model, "a", tmp_path)
    assert_same_up_to_rounding(logits(model), logits(theirs), "logits")
    for name in ("b", "a"):  # a new adapter, and over one that is there
        mx.load_adapter(model, name, tmp_path)
    assert torch.equal(logits(model, adapter_names=["b"] * 2), logits(model, adapter_names=["a"] * 2))
    file = tmp_path / "adapter_model.safetensors"
    parts = {k: v for k, v in load_file(file).items() if k.endswith(("lora_A.weight", "lora_B.weight"))}
    save_file(parts, file)
    with pytest.raises(ValueError, match=r"expected lora_A, lora_B, lora_\w+, got lora_A, lora_B$"):
        mx.load_adapter(model, "c", tmp_path)


@KINDS
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_from_peft(kind: str) -> None:
    theirs = get_peft_model(gpt2(), config(kind, lora_dropout=0.2), adapter_name="a")
    theirs.add_adapter("b", config("bias" if kind == "dora" else "dora"))
    shaken(theirs).eval()
    for module in theirs.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("a", 0.7)
    expected = {}
    for name in ("b", "a"):
        theirs.set_adapter(name)
        expected[name] = logits(theirs)
    part = "lora_magnitude_vector" if kind == "dora" else "lora_B"
    frozen = theirs.base_model.model.transformer.h[0].attn.c_attn
    getattr(frozen, part)["a"].requires_grad_(False)
    model = mx.from_peft(theirs)
    for name, wanted in expected.items():
        assert_same_up_to_rounding(logits(model, adapter_names=[name] * 2), wanted, name)
    own = model.transformer.h[0].attn.c_attn.parameters_of("a")
    names = ["lora_magnitude_vector"] if kind == "dora" else ["lora_B", "lora_bias"]
    assert {key for key, parameter in own.items() if not parameter.requires_grad} == set(names)
    with mx.disable_adapter(model):
        base = logits(model, adapter_names=["a", "b"])
    assert torch.equal(base, logits(model, adapter_names=["__base__"] * 2))


@KINDS
def test_merged_as_peft_merges(kind: str) -> None:
    base = gpt2()
    theirs = shaken(get_peft_model(copy.deepcopy(base), config(kind), adapter_name="a"))
    model = mx.from_peft(copy.deepcopy(theirs))
    merged, wanted = mx.merge_and_unload(model.eval()), theirs.merge_and_unload()
    for key, value in wanted.state_dict().items():
        assert torch.equal(merged.state_dict()[key], value), key
    assert_same_up_to_rounding(logits(merged), logits(model), "logits", 1e-4)


def test_a_bias_that_the_base_lacks_is_not_merged() -> None:
    model = mx.convert_model(llama(), {"a": LoraConfig(lora_bias=True, target_modules=["q_proj"])})
    with pytest.raises(ValueError, match=r"adapter 'a': layer .*q_proj has no bias that could take its lora"):
        mx.merge_and_unload(model)


@KINDS
def test_the_checkpoint_of_a_trainer(kind: str, tmp_path: Path) -> None:
    base = gpt2()
    model = shaken(mx.convert_model(copy.deepcopy(base), {"a": config(kind)})).eval()
    model.save_pretrained(tmp_path)
    assert_same_up_to_rounding(
        logits(PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)), logits(model), "logits"
    )
    other = mx.convert_model(copy.deepcopy(base), {"a": config(kind)}).eval()
    report = other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert report.unexpected_keys == report.missing_keys == []
    assert torch.equal(logits(other), logits(model))
    theirs = get_peft_model_state_dict(get_peft_model(copy.deepcopy(base), config(kind)))
    keys = {key.removeprefix("base_model.model.") for key in theirs}
    assert model.get_adapter_state_dict("a").keys() == keys


@KINDS
@pytest.mark.parametrize("how", [True, False, "gaussian"])
def test_begins_as_peft_begins(kind: str, how: Any) -> None:
    """The magnitudes are norms; a bias is zero, or drawn as PEFT draws it."""
    base = gpt2()
    if (kind, how) == ("bias", "gaussian"):
        with pytest.raises(ValueError, match="lora_bias=True is only supported with init_lora_weights=True"):
            LoraConfig(lora_bias=True, init_lora_weights=how)
        later = config(kind)
        later.init_lora_weights = how
        with pytest.raises(ValueError, match="adapter 'a': lora_bias=True needs init_lora_weights=True or"):
            mx.convert_model(base, {"a": later})
        return
    fields = config(kind)
    fields.init_lora_weights = how
    model = mx.convert_model(copy.deepcopy(base), {"a": fields}).eval()
    layer = model.transformer.h[0].attn.c_attn
    own, scaling = layer.parameters_of("a"), layer.specs["a"].scaling
    if kind == "dora":
        whole = layer.weight.t() + scaling * own["lora_B"] @ own["lora_A"]
        torch.testing.assert_close(own["lora_magnitude_vector"], whole.norm(dim=1))
    else:
        bound = 0.5 if how is False else 0.0  # 1 / sqrt(4)
        assert own["lora_bias"].abs().max() <= bound
        assert (own["lora_bias"].std() > bound / 3) == (how is False)
    if how is not False:
        assert_same_up_to_rounding(logits(model), logits(base), "logits")


def test_what_peft_refuses() -> None:
    fields = config("dora")
    fields.lora_bias = True
    with pytest.raises(ValueError, match="adapter 'a': lora_bias=True is not supported with use_dora=True"):
        mx.convert_model(gpt2(), {"a": fields})


SKIPS = ["lm_head", "up_proj"]


def over(said: Any, *names: str) -> nn.Module:
    """A model that claims to be quantised so."""
    model = mx.convert_model(llama(), {name: LoraConfig(r=2, target_modules=["q_proj"]) for name in names})
    model.hf_quantizer = SimpleNamespace(pre_quantized=False, quantization_config=said)
    return model


def int8(**more: Any) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_8bit=True, **more)


def test_a_warning_names_the_field_and_the_callers_line(tmp_path: Path) -> None:
    model = over(int8(llm_int8_skip_modules=SKIPS), "a")
    with pytest.warns(UserWarning, match="quantization.json") as caught:
        mx.save_adapter(model, "a", tmp_path / "a")
    assert [(str(one.message), one.filename) for one in caught] == [
        (
            "quantization.json cannot say how this base is quantised: bnb-int8 with "
            "llm_int8_skip_modules=['lm_head', 'up_proj']; load the base with this yourself",
            __file__,
        )
    ]
    assert not (tmp_path / "a" / "quantization.json").exists()


@pytest.mark.parametrize(("fields", "named"), [({"bits": 4, "axis": None}, "hqq with bits=4"), ({}, "hqq")])
def test_a_method_that_runs_lack_is_named(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    hqq = SimpleNamespace(to_dict=lambda: {"quant_method": "hqq", **fields})
    with pytest.warns(UserWarning, match=f"is quantised: {named}; load the base with this yourself$"):
        mx.save_adapter(over(hqq, "a"), "a", tmp_path / "a")


@pytest.mark.parametrize("names", ["a", "ab"])
def test_the_warning_comes_when_all_is_saved(names: str, tmp_path: Path) -> None:
    """One for all adapters."""
    model = over(int8(llm_int8_skip_modules=SKIPS), *names)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="up_proj"):
            mx.save_adapter(model, "a", tmp_path / "one")
        with pytest.raises(UserWarning, match="up_proj"):
            model.save_pretrained(tmp_path / "all")
    folders = [tmp_path / "all" / name for name in names] if len(names) > 1 else [tmp_path / "all"]
    for folder in (tmp_path / "one", *folders):
        mx.load_adapter(llama(), "a", folder)
    assert (tmp_path / "all" / "model.safetensors").exists()


def test_another_base_is_warned_of_at_the_callers_line(tmp_path: Path) -> None:
    mx.save_adapter(over(int8(), "a"), "a", tmp_path / "a")
    assert json.loads((tmp_path / "a" / "quantization.json").read_text()) == {"method": "bnb-int8"}
    with pytest.warns(UserWarning, match="was trained over bnb-int8, but this base is plain") as caught:
        mx.load_adapter(llama(), "b", tmp_path / "a")
    assert [one.filename for one in caught] == [__file__]
