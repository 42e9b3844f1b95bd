"""Entries of a config that match nothing beside others that do are warned of, and no others are."""

import warnings
from typing import Any

import pytest
from models import llama
from peft import LoraConfig
from torch import nn

import mlora_ext as mx
from tests.mixtures import mixture


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
