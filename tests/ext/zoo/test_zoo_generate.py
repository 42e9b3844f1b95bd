"""`generate` of mixed batches over Transformers' families: each prompt continues as its adapter does.

Only three tokens may follow, so that prompts often continue with the same one while their caches differ.
"""

import copy
import dataclasses
from typing import Any

import pytest
import torch
import transformers
from compare import RANKS, collate, following_advice
from families import FAMILIES, Family
from inputs import FIRST_WORD, make_samples
from tolerances import assert_same_up_to_rounding
from torch import Tensor, nn

import mlora_ext as mx

QUICK = {
    "LlamaForCausalLM": (1, 4),
    "MixtralForCausalLM": (4,),
    "MambaForCausalLM": (1, 4),
    "XLNetLMHeadModel": (4,),
    "BartForConditionalGeneration": (1,),
    "MllamaForCausalLM": (4,),
}
"""Families, and the lengths of their prompts."""
UNCACHED, CACHED = {"use_cache": False}, {"use_cache": True}
HOW: list[dict[str, Any]] = [
    CACHED,
    UNCACHED,
    CACHED | {"num_beams": 2, "num_return_sequences": 2},
    CACHED | {"do_sample": True},
    CACHED | {"num_return_sequences": 2, "do_sample": True},
]
REFUSED = {
    **dict.fromkeys(["llava", "paligemma", "qwen2_5_vl", "qwen2_vl"], "outside of the model's own forward"),
    "rwkv": "not ordered by sample, or several samples share them",
}
"""Images are encoded before the first forward pass; RWKV's cache mixes samples."""
CHANGES = {
    "flaubert": {"mask_token_id": 5},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "qwen3_next": {"num_hidden_layers": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xlm": {"mask_token_id": 5},
}
"""A cache that works only with a layer of attention; a token to predict that is no padding."""
NAMES = ["a", "b", "__base__", "b"]


def every_family() -> list[object]:
    """With prompts of one token and of four.

    Whether a class generates is asked when its test runs: asking imports the class.
    """
    return [
        pytest.param(
            length,
            family,
            id=f"{length}-{family.kind}",
            marks=() if family.kind in QUICK and length in QUICK[family.kind] else pytest.mark.nightly,
        )
        for family in FAMILIES
        for length in (1, 4)
    ]


def converted(family: Family) -> nn.Module:
    """In fp32, with random adapters on all linear layers that can have one."""
    changes = family.changes | CHANGES.get(family.model_type, {})
    base = dataclasses.replace(family, changes=changes).build()
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


def ways(family: Family, length: int) -> list[dict[str, Any]]:
    """Those that the base itself can generate in."""
    kind = family.model_type
    if kind == "xlstm" or (kind == "recurrent_gemma" and length == 1):
        return [UNCACHED]  # a cache of the wrong shape; a cache that a prompt of one token does not clear
    if kind == "rwkv":
        return [UNCACHED, CACHED]  # its cache serves no beams
    if kind == "whisper":  # it repeats its batch itself, which is refused: test_call_kinds
        return [how for how in HOW if "num_return_sequences" not in how]
    return HOW


@pytest.mark.parametrize(("length", "family"), every_family())
def test_each_prompt_continues_as_its_adapter_does(length: int, family: Family) -> None:
    if not getattr(getattr(transformers, family.kind), "can_generate", bool)():
        pytest.skip(f"{family.kind} has no generate")
    model = converted(family)
    batch = collate(make_samples(family, model, len(NAMES), length))
    batch.pop("decoder_input_ids", None)
    if "input_ids" in batch and "pixel_values" not in batch:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    seed = int(torch.randint(2**31, ()))

    def generate(names: list[str], how: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Tokens `[sequences, length]` and logits `[sequences, 4, vocabulary]`."""
        torch.manual_seed(seed)
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "num_beams": 1, "do_sample": False, **how}
        options |= {"output_logits": True, "return_dict_in_generate": True, "logits_processor": [few_words]}
        out = model.generate(**batch, adapter_names=names, **options)
        return out.sequences, torch.stack(list(out.logits), 1)

    refused = REFUSED.get(family.model_type)
    for how in ways(family, length):
        if refused is not None and (how != UNCACHED or family.model_type != "rwkv"):
            with pytest.raises(ValueError, match=refused):
                generate(NAMES, how)
            continue
        tokens, logits = generate(NAMES, how)
        assert len(tokens) == len(NAMES) * how.get("num_return_sequences", 1)
        if "do_sample" in how:
            continue  # the numbers that others draw depend on the order of samples
        alone = {name: generate([name] * len(NAMES), how) for name in set(NAMES)}
        each = len(tokens) // len(NAMES)
        for sample, name in enumerate(NAMES):
            own = slice(sample * each, (sample + 1) * each)
            assert torch.equal(tokens[own], alone[name][0][own]), (how, sample, name)
            if "num_beams" not in how:
                assert_same_up_to_rounding(logits[sample], alone[name][1][sample], f"{how}, {sample}", 1e-4)
                for other in {"a", "b"} - {name}:
                    difference = (logits[sample, 0] - alone[other][1][sample, 0]).norm()
                    assert difference > 1e-3 * logits[sample, 0].norm(), (sample, other)
