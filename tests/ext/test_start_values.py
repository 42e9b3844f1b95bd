"""init_lora_weights of folders: served where only A and B began otherwise, refused where the base changed."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import llama, token_ids
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import CordaConfig, LoraGAConfig
from tolerances import assert_same_up_to_rounding
from torch import nn

import mlora_ext as mx


def saved(base: nn.Module, folder: Path, how: Any, **fields: Any) -> PeftModel:
    """A PEFT model over a copy of the base, trained a little, and its folder."""
    config = LoraConfig(
        r=4, lora_alpha=9, target_modules=["q_proj", "up_proj"], init_lora_weights=how, **fields
    )
    peft = get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for key, parameter in peft.named_parameters():
            if "lora_" in key:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    peft.save_pretrained(folder)
    return peft.eval()


@pytest.mark.parametrize(
    ("how", "fields"),
    [("orthogonal", {}), ("eva", {}), ("gaussian", {}), (False, {}), (True, {"corda_config": CordaConfig()})],
)
@pytest.mark.filterwarnings("ignore")
def test_folders_with_other_start_values(how: Any, fields: dict, tmp_path: Path) -> None:
    base, ids = llama().eval(), token_ids(2, 5)
    peft = saved(base, tmp_path / "a", how, **fields)
    again = copy.deepcopy(base)
    mx.load_adapter(again, "x", tmp_path / "a")
    taken = mx.from_peft(copy.deepcopy(peft))
    with torch.no_grad():
        expected = peft(input_ids=ids).logits
        assert_same_up_to_rounding(again(input_ids=ids).logits, expected, "logits of what was loaded")
        assert_same_up_to_rounding(taken(input_ids=ids).logits, expected, "logits of what was taken over")
        mx.save_adapter(again, "x", tmp_path / "b")
        theirs = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "b").eval()
        assert_same_up_to_rounding(theirs(input_ids=ids).logits, expected, "logits of PEFT")
    mx.load_adapter(again, "y", tmp_path / "b")
    mx.load_adapter(again, "x", tmp_path / "a")


@pytest.mark.parametrize("how", ["pissa", "pissa_niter_4", "olora", "lora_ga"])
@pytest.mark.filterwarnings("ignore")
def test_folders_over_another_base(how: str, tmp_path: Path) -> None:
    base = llama()
    settings = {"lora_ga_config": LoraGAConfig()} if how == "lora_ga" else {}
    peft = saved(base, tmp_path, how, **settings)
    for refused in (lambda: mx.load_adapter(base, "a", tmp_path), lambda: mx.from_peft(peft)):
        message = f"init_lora_weights='{how}' is not supported for an adapter of PEFT: .* make a plain LoRA"
        with pytest.raises(ValueError, match=message):
            refused()
    assert all(parameter.requires_grad for parameter in base.parameters())


@pytest.mark.parametrize(
    ("how", "fields", "message"),
    [
        ("mica", {}, "with it PEFT never trains lora_B"),
        ("pissa_niter_x", {}, "expected True, False, 'gaussian', 'orthogonal', 'eva', 'pissa'"),
    ],
)
def test_refused_initialisations(how: str, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"init_lora_weights='{how}' is not supported: {message}"):
        mx.convert_model(llama(), {"a": LoraConfig(init_lora_weights=how, **fields)})


@pytest.mark.filterwarnings("ignore")
def test_a_pissa_folder_made_plain(tmp_path: Path) -> None:
    """The way out that the refusal names."""
    base, ids = llama().eval(), token_ids(2, 5)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa")
    peft = get_peft_model(copy.deepcopy(base), config)
    peft.peft_config["default"].init_lora_weights = True
    peft.save_pretrained(tmp_path / "start")
    with torch.no_grad():
        for key, parameter in peft.named_parameters():
            if "lora_" in key:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        expected = peft.eval()(input_ids=ids).logits
        peft.save_pretrained(
            tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "start")
        )
        mx.load_adapter(base, "a", tmp_path / "plain")
        assert_same_up_to_rounding(base(input_ids=ids).logits, expected, "logits", 1e-4)


def test_a_name_as_a_pattern_is_told_from_a_list() -> None:
    with pytest.raises(
        ValueError, match=r"a string is a pattern for whole names; did you mean \['q_proj'\]\?"
    ):
        mx.convert_model(llama(), {"a": LoraConfig(target_modules="q_proj")})
    mx.convert_model(llama(), {"a": LoraConfig(target_modules=["q_proj"])})
