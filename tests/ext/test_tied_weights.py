"""`ensure_weight_tying`: copies of an embedding and of its tied head are one weight.

`test_heads.py` compares their training and their folders with PEFT's.
"""

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from head_models import VOCABULARY, llama, lora
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from tolerances import assert_same_up_to_rounding
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

import mlora_ext as mx

HEAD, TABLE = "base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"
BOTH = {
    "a": lora(modules_to_save=["lm_head"], ensure_weight_tying=True),
    "b": lora(modules_to_save=["lm_head"]),
}


def tied() -> nn.Module:
    return llama(tie_word_embeddings=True)


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY))


def roberta() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return RobertaForMaskedLM(RobertaConfig(**sizes, vocab_size=VOCABULARY))


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, vocab_size=VOCABULARY, decoder_start_token_id=0))


def bart() -> nn.Module:
    sizes = {f"{part}_{size}": 1 for part in ("encoder", "decoder") for size in ("layers", "attention_heads")}
    sizes |= {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    return BartForConditionalGeneration(BartConfig(**sizes, vocab_size=VOCABULARY))


def changed() -> nn.Module:
    model = mx.convert_model(tied(), copy.deepcopy(BOTH), seed=3).eval()
    for name in BOTH:
        for parameter in mx.adapter_parameters(model, name).values():
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model


@torch.no_grad()
def test_both_layers_have_the_weight_in_copies_and_merged_models(tmp_path: Path) -> None:
    model, ids = changed(), torch.randint(2, VOCABULARY, (2, 6))
    names = [key for key in mx.adapter_parameters(model, "a") if "lora" not in key]
    assert names == ["model.embed_tokens.modules_to_save.a.weight"]
    expected = model(input_ids=ids, adapter_names=["a", "b"]).logits
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        mx.adapter_parameters(model, "a")[names[0]].data.mul_(0.5)
        assert torch.equal(other(input_ids=ids, adapter_names=["a", "b"]).logits, expected)
    expected = model(input_ids=ids, adapter_names=["a", "a"]).logits
    half = copy.deepcopy(model).bfloat16()(input_ids=ids, adapter_names=["a", "a"]).logits
    assert (half.float() - expected).norm() < 0.05 * expected.norm()
    merged: Any = mx.merge_and_unload(model, "a")
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    assert_same_up_to_rounding(merged(input_ids=ids).logits, expected, "merged")
    before = model(input_ids=ids, adapter_names=["b", "b"]).logits
    mx.remove_adapter(model, "a")
    assert torch.equal(model(input_ids=ids, adapter_names=["b", "b"]).logits, before)


@torch.no_grad()
def test_a_model_whose_head_is_before_its_embedding() -> None:
    base = tied()
    base._modules = {"lm_head": base.lm_head, **base._modules}
    model = mx.convert_model(base, {"a": copy.deepcopy(BOTH["a"])}).eval()
    for parameter in mx.adapter_parameters(model, "a").values():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    merged: Any = mx.merge_and_unload(model, "a")
    ids = torch.randint(2, VOCABULARY, (2, 6))
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    assert_same_up_to_rounding(merged(input_ids=ids).logits, model(input_ids=ids).logits, "merged")


def test_copies_without_a_weight_of_their_own_are_not_tied() -> None:
    class Deep(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.first, self.second = (nn.Sequential(nn.Linear(32, 32)) for _ in range(2))

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            states = super().forward(*args, output_hidden_states=True, **kwargs).hidden_states
            return self.second(self.first(states[-1]))

    config = lora(modules_to_save=["lm_head", "first", "second"], ensure_weight_tying=True)
    theirs = get_peft_model(Deep(tied().config), config).eval()
    for parameter in theirs.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    ours, ids = mx.from_peft(copy.deepcopy(theirs)), torch.randint(2, VOCABULARY, (2, 6))
    assert_same_up_to_rounding(ours(input_ids=ids), theirs(input_ids=ids), "from_peft")


def test_a_folder_with_two_weights(tmp_path: Path) -> None:
    model, file = changed(), tmp_path / "a" / "adapter_model.safetensors"
    mx.save_adapter(model, "a", tmp_path / "a")
    state = load_file(file)
    assert torch.equal(state[HEAD], state[TABLE])
    del state[HEAD]
    save_file(state, file)
    mx.load_adapter(tied(), "a", tmp_path / "a")
    save_file(state | {HEAD: state[TABLE] + 1}, file)
    with pytest.raises(ValueError, match=r"differs from the weight of model\.embed_tokens"):
        mx.load_adapter(tied(), "a", tmp_path / "a")


# fmt: off
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (tied, {"target_modules": ["lm_head"]}, "for low-rank parts (lm_head is in target_modules): PEFT gives"),
    (tied, {"trainable_token_indices": {"lm_head": [3]}}, "must name the same tokens for model.embed_tokens"),
    (tied, {"trainable_token_indices": {"lm_head": [3], "embed_tokens": [4]}}, "must name the same tokens"),
    (gpt2, {"target_modules": ["c_attn"], "modules_to_save": ["wte"]},
     "PEFT ties only embed_tokens and lm_head, and modules_to_save names transformer.wte; name lm_head"),
    (roberta, {"target_modules": ["query"], "modules_to_save": ["lm_head"]}, "lm_head.decoder has a bias"),
    *((t5, {"target_modules": ["q"], "modules_to_save": names},
       "decoder.embed_tokens has the weight of shared and is of class Embedding; only linear layers can")
      for names in (["lm_head"], ["shared"], ["embed_tokens", "lm_head"])),
    (bart, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
     "model.decoder.embed_tokens has the weight of model.shared and is of class BartScaledWordEmbedding"),
]
# fmt: on


@pytest.mark.parametrize(("build", "fields", "message"), REFUSED)
def test_refused_with_the_reason(build: Any, fields: dict[str, Any], message: str) -> None:
    model = build()
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=re.escape(message)):
        mx.convert_model(model, {"x": lora(**fields, ensure_weight_tying=True)})
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize("fields", [{}, {"modules_to_save": ["norm"]}, {"trainable_token_indices": [3, 4]}])
def test_nothing_changes_where_all_is_tied_already(fields: dict[str, Any]) -> None:
    config = lora(**fields)
    kept = copy.deepcopy(config)
    kept.ensure_weight_tying = True
    found = [mx.convert_model(tied(), {"a": each}) for each in (config, kept)]
    names = [[(key, type(module)) for key, module in model.named_modules()] for model in found]
    assert names[0] == names[1]
    assert list(mx.adapter_parameters(found[0], "a")) == list(mx.adapter_parameters(found[1], "a"))


def test_warned_where_nothing_is_tied_as_by_peft() -> None:
    config = BOTH["a"]
    with pytest.warns(UserWarning, match="no tied modules were found in the model"):
        get_peft_model(llama(), copy.deepcopy(config))
    with pytest.warns(
        UserWarning, match="adapter 'a': ensure_weight_tying changes nothing: no modul"
    ) as seen:
        mx.convert_model(llama(), {"a": copy.deepcopy(config)})
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mx.convert_model(tied(), {"a": copy.deepcopy(config)})


@pytest.mark.parametrize("fields", [{"target_modules": ["embed_tokens"]}, {"trainable_token_indices": [4]}])
def test_a_copy_of_the_tied_head_counts_for_the_embedding(fields: dict[str, Any]) -> None:
    """Another adapter cannot train parts of it; without `ensure_weight_tying` it can train low-rank ones."""
    model = mx.convert_model(tied(), {"a": copy.deepcopy(BOTH["a"])})
    with pytest.raises(ValueError, match=r"layer model\.embed_tokens: adapter 'a' trains a copy of it and"):
        mx.add_adapter(model, "b", lora(**fields))
    low_rank = lora(target_modules=["embed_tokens"])
    mx.convert_model(tied(), {"a": copy.deepcopy(BOTH["b"]), "b": low_rank})
