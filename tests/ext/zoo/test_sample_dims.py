"""The table of where samples lie says what trial passes find, for every class of the zoo."""

import json

import pytest
import transformers
from families import FAMILIES, Family
from sample_dims import heads, merged, observed, observed_head, table

from mlora_ext.routing.sample_table import TABLE, entries, owner_of

QUICK = {"LlamaForCausalLM", "XLNetLMHeadModel"}


def _in_table(owner: str, name: str, dims: int) -> str | None:
    found = entries().get((owner, name, dims))
    return f"!{found}" if isinstance(found, str) else found and str(found)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, id=one.kind, marks=() if one.kind in QUICK else pytest.mark.nightly)
        for one in FAMILIES
    ],
)
def test_every_line_is_what_trial_passes_find(family: Family) -> None:
    found = observed(family)
    assert found
    for line, texts in found.items():
        known = _in_table(*line)
        assert known is not None, line
        assert merged({*texts, known}) == known, line


@pytest.mark.nightly
@pytest.mark.parametrize("head", [pytest.param(one, id=one.kind) for one in heads()])
def test_every_line_of_another_head_is_what_trial_passes_find(head: Family) -> None:
    for line, texts in observed_head(head).items():
        known = _in_table(*line)
        assert known is not None, line
        assert merged({*texts, known}) == known, line


def test_every_class_has_lines() -> None:
    owners = {owner for owner, _, _ in entries()}
    assert owners >= {owner_of(getattr(transformers, family.kind)) for family in FAMILIES}
    assert json.loads(TABLE.read_text())["transformers"] <= transformers.__version__


def test_lines_that_contradict_each_other_have_no_place() -> None:
    assert merged({"single 0"}) == "single 0"
    assert merged({"single 0", "single 0 any"}) == "single 0 any"
    assert merged({"single 0", "blocks 0 any"}) == "blocks 0 any"
    assert merged({"single 0", "!why"}) == "!why"
    assert merged({"single 0", "single 1"}).startswith("!")
    text = table({("llama.Llama", "q", 3): {"single 0"}, ("llama.Llama", "k", 3): {"single 0"}})
    assert json.loads(text)["owners"] == {"llama.Llama": {"3: single 0": "k q"}}
