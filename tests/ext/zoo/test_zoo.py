"""Families of Transformers: each is what PEFT gives for its adapter alone, or refused by name."""

import pytest
from compare import NAMES, outcome, outcome_of_parts
from families import FAMILIES, Family
from inputs import make_batches, make_model
from parts import parts_of
from refusals import all_linear, in_order, part, says

QUICK = {
    "LlamaForCausalLM",
    "FalconForCausalLM",
    "MixtralForCausalLM",
    "MambaForCausalLM",
    "BertForSequenceClassification",
    "XLNetLMHeadModel",
    "LongformerForMaskedLM",
    "FSMTForConditionalGeneration",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
    "CvtForImageClassification",
    "CLIPModel",
    "Qwen2VLForConditionalGeneration",
    "Wav2Vec2ForSequenceClassification",
}
QUICK_PARTS = {"LlamaForCausalLM", "ViTForImageClassification"}


def _families(quick: set[str]) -> list[object]:
    marks = {True: (), False: pytest.mark.nightly}
    return [pytest.param(one, id=one.kind, marks=marks[one.kind in quick]) for one in FAMILIES]


@pytest.mark.parametrize("family", _families(QUICK))
def test_every_sample_gets_its_own_adapter(family: Family) -> None:
    """Outputs and gradients of a mixed batch; what is refused at first is so by name, and advice works."""
    model = make_model(family)
    found = outcome(model, make_batches(family, model), NAMES)
    assert found.verdict == "equal", found.reasons
    expected = all_linear(family.kind)
    if expected is None:
        assert not found.reasons
    else:
        assert found.reasons
        assert all(says(expected, reason) for reason in found.reasons), found.reasons


@pytest.mark.parametrize("family", _families(QUICK_PARTS))
def test_parts_are_trained_as_peft_trains_them(family: Family) -> None:
    """LoRA on embeddings and the head, trained rows, and copies of the head and of a norm."""
    model = make_model(family)
    batches = make_batches(family, model)
    targets = {"target_modules": "all-linear"}
    if all_linear(family.kind) is not None:
        targets = outcome(model, batches, NAMES).targets
    for column, own in parts_of(model, batches[0], targets).items():
        found = outcome_of_parts(model, batches, own.names, own.configs, own.modules)
        verdict, expected = part(family.kind, column)
        assert found.verdict == verdict, (column, found.reasons)
        assert expected is None or says(expected, found.reasons[0]), (column, found.reasons)


def test_what_is_named_is_in_the_list() -> None:
    refused = {kind for one in in_order() for kind in one.kinds}
    assert {family.kind for family in FAMILIES} >= QUICK | QUICK_PARTS | refused
    assert len({family.model_type for family in FAMILIES}) >= 150
    assert len({family.kind for family in FAMILIES}) == len(FAMILIES)
