"""Random calls of one model: what one batch has taught about it is not used wrongly for another."""

import random
from typing import Any

import pytest
import torch
from families import FAMILIES, Family
from inputs import FIRST_WORD
from test_zoo_generate import converted
from tolerances import assert_same_up_to_rounding
from torch import Tensor

QUICK = {
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "XLNetLMHeadModel",
    "BertForSequenceClassification",
    "ModernBertForMaskedLM",
    "LongformerForMaskedLM",
    "BartForConditionalGeneration",
}
MORE = {
    "FalconForCausalLM",
    "Gemma2ForCausalLM",
    "GPT2LMHeadModel",
    "MambaForCausalLM",
    "Qwen3ForCausalLM",
    "MegatronBertForMaskedLM",
    "DebertaV2ForMaskedLM",
    "ReformerForMaskedLM",
    "RobertaForSequenceClassification",
    "LlamaForSequenceClassification",
    "LEDForConditionalGeneration",
    "T5ForConditionalGeneration",
}
PAD = 0
CALLS = 8


def families() -> list[object]:
    chosen = [family for family in FAMILIES if family.kind in QUICK | MORE]
    assert len(chosen) == len(QUICK | MORE)
    marks = {True: (), False: pytest.mark.nightly}
    return [pytest.param(one, id=one.kind, marks=marks[one.kind in QUICK]) for one in chosen]


def random_call(draw: random.Random, family: Family) -> dict[str, Any]:
    """Tokens of few kinds, some samples alike; often with a mask that treats samples alike or not."""
    batch, length = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 4, 6])
    ids = torch.randint(FIRST_WORD, FIRST_WORD + 6, (batch, length))
    if draw.random() < 0.2:
        ids = ids[:1].repeat(batch, 1)
    call = {"input_ids": ids}
    if draw.random() < 0.7:
        call["attention_mask"] = torch.ones_like(ids)
        for sample in range(batch):
            pads = draw.randrange(length) if draw.random() < 0.5 else 0
            place = slice(length - pads, length) if draw.random() < 0.7 else slice(0, pads)
            call["attention_mask"][sample, place] = 0
            ids[sample, place] = PAD
    words = torch.randint(FIRST_WORD, FIRST_WORD + 6, (batch, draw.choice([1, 3])))
    if family.group == "encoder-decoder":
        call["labels" if draw.random() < 0.5 else "decoder_input_ids"] = words
    elif family.group == "decoder" and draw.random() < 0.3:
        call["labels"] = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    return call


@pytest.mark.parametrize("family", families())
def test_every_call_is_right(family: Family, fresh_seed: int) -> None:
    draw, model = random.Random(fresh_seed), converted(family)
    for number in range(CALLS):
        call = random_call(draw, family)
        batch, length = call["input_ids"].shape
        names = [draw.choice(["a", "b", "__base__"]) for _ in range(batch)]
        model.train(draw.random() < 0.5)
        together = model(**call, adapter_names=names).logits.detach()
        for sample, name in enumerate(names):
            alone = model(**call, adapter_names=[name] * batch).logits.detach()
            seen: Tensor | slice = slice(None)
            if "attention_mask" in call and together.dim() == 3 and together.shape[1] == length:
                seen = call["attention_mask"][sample].bool()
            what = f"call {number}, sample {sample} of adapter {name}"
            assert_same_up_to_rounding(together[sample][seen], alone[sample][seen], what)
