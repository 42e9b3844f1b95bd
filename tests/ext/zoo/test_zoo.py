"""Families of Transformers: each is what PEFT gives for its adapter alone, or refused by name."""

import pytest
from compare import NAMES, outcome
from families import FAMILIES, REFUSED, Family
from inputs import make_batches, make_model

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


def _parameter(family: Family) -> object:
    marks = () if family.kind in QUICK else pytest.mark.nightly
    return pytest.param(family, id=family.kind, marks=marks)


@pytest.mark.parametrize("family", [_parameter(family) for family in FAMILIES])
def test_every_sample_gets_its_own_adapter(family: Family) -> None:
    """Outputs and gradients of a mixed batch; what is refused at first is so by name, and advice works."""
    model = make_model(family)
    found = outcome(model, make_batches(family, model), NAMES)
    assert found.verdict == "equal", found.reasons
    expected = REFUSED.get(family.model_type)
    if expected is None:
        assert not found.reasons
    else:
        assert found.reasons
        assert all(expected in reason for reason in found.reasons), found.reasons


def test_the_quick_choice_is_in_the_list() -> None:
    assert {family.kind for family in FAMILIES} >= QUICK
    assert len({family.model_type for family in FAMILIES}) >= 150
    assert len({family.kind for family in FAMILIES}) == len(FAMILIES)
