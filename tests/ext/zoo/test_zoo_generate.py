"""`generate` of mixed batches over Transformers' families: each prompt continues as its adapter does.

Only three tokens may follow, so that prompts often continue with the same one while their caches differ.
"""

import copy
from typing import Any

import pytest
import torch
import transformers
from compare import RANKS, collate, following_advice
from families import FAMILIES, Family
from inputs import FIRST_WORD, make_samples
from torch import Tensor, nn

import mlora_ext as mx

QUICK = {
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "MambaForCausalLM",
    "XLNetLMHeadModel",
    "BartForConditionalGeneration",
    "T5ForConditionalGeneration",
    "MllamaForCausalLM",
}
REFUSED = {
    **dict.fromkeys(["llava", "paligemma", "qwen2_5_vl", "qwen2_vl"], "outside of the model's own forward"),
    "switch_transformers": "as inside a mixture of experts",
}
"""Newer versions of Transformers encode images before the first forward pass, past where names are known."""
HOW: list[dict[str, Any]] = [
    {},
    {"do_sample": True},
    {"num_beams": 2},
    {"num_return_sequences": 2, "do_sample": True},
    {"use_cache": False},
]
NAMES = ["a", "b", "__base__", "b"]


def generating() -> list[object]:
    found = []
    for family in FAMILIES:
        kind = getattr(transformers, family.kind)
        if getattr(kind, "can_generate", bool)():
            marks = () if family.kind in QUICK else pytest.mark.nightly
            found.append(pytest.param(family, id=family.kind, marks=marks))
    return found


def converted(family: Family) -> nn.Module:
    """In fp32, with random adapters on all linear layers that can have one."""
    base = family.build()
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    if base.can_generate():
        generation = base.generation_config
        generation.forced_bos_token_id = generation.forced_eos_token_id = generation.suppress_tokens = None
    if base.config.is_encoder_decoder and getattr(base.config, "decoder_start_token_id", None) is None:
        base.config.decoder_start_token_id = base.generation_config.decoder_start_token_id = 0
    model = following_advice(lambda configs: mx.convert_model(copy.deepcopy(base), configs)).eval()
    with torch.no_grad():
        for name in RANKS:
            for parameter in mx.adapter_parameters(model, name).values():
                parameter.normal_(std=0.2)
    return model


def few_words(ids: Tensor, scores: Tensor) -> Tensor:
    kept = torch.full_like(scores, -torch.inf)
    kept[:, FIRST_WORD : FIRST_WORD + 3] = scores[:, FIRST_WORD : FIRST_WORD + 3]
    return kept


@pytest.mark.parametrize("family", generating())
@pytest.mark.parametrize("length", [1, 4])
def test_each_prompt_continues_as_its_adapter_does(family: Family, length: int) -> None:
    model = converted(family)
    batch = collate(make_samples(family, model, len(NAMES), length))
    batch.pop("decoder_input_ids", None)
    if "input_ids" in batch and "pixel_values" not in batch:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    seed = int(torch.randint(2**31, ()))

    def generate(names: list[str], how: dict[str, Any]) -> Tensor:
        torch.manual_seed(seed)
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, **how}
        out = model.generate(**batch, adapter_names=names, logits_processor=[few_words], **options)
        return out if isinstance(out, Tensor) else out.sequences

    for how in HOW:
        if family.model_type == "whisper" and "num_return_sequences" in how:
            continue  # it repeats its batch itself, which is refused: test_call_kinds
        try:
            together = generate(NAMES, how)
        except ValueError as error:
            if REFUSED.get(family.model_type, "no refusal") in str(error):
                continue
            raise
        each = len(together) // len(NAMES)
        assert each == how.get("num_return_sequences", 1)
        if "do_sample" in how:
            continue  # the numbers that others draw depend on the order of samples
        for sample, name in enumerate(NAMES):
            alone = generate([name] * len(NAMES), how)
            assert torch.equal(together[sample], alone[sample]), (how, sample, name)
