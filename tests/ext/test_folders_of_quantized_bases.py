"""What `quantization.json` in an adapter's folder cannot hold, and another base than it names: warnings."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models import llama
from peft import LoraConfig
from torch import nn
from transformers import BitsAndBytesConfig

import mlora_ext as mx

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
