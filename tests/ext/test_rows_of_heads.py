"""Trained rows of heads, with biases or quantised, and tied embeddings."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from head_models import VOCABULARY, assert_refused, llama, lora
from models import assert_same_gradients, copy_weights, peft_model
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners import trainable_tokens
from safetensors.torch import load_file, save_file
from test_start_from_weights import Rounded
from tolerances import assert_same_up_to_rounding
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

import mlora_ext as mx
from mlora_ext.layers.embedding import peft_drops_bias

TOKENS = [3, 5, 9, 17]
LEAVES_OUT = "PEFT's unmerged forward of its folder leaves the bias of cls.predictions.decoder out"


def bert(bias: float) -> BertForMaskedLM:
    """Its decoder is tied to the embedding; `bias` is the standard deviation of the decoder's bias."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.2}
    model = BertForMaskedLM(BertConfig(**sizes, **still, num_attention_heads=2, vocab_size=29)).eval()
    nn.init.normal_(model.cls.predictions.decoder.bias, std=bias)
    assert model.cls.predictions.decoder.weight is model.get_input_embeddings().weight
    return model


def rows(**fields: Any) -> LoraConfig:
    return lora(target_modules=["query"], trainable_token_indices=TOKENS, init_lora_weights=False, **fields)


def ids() -> torch.Tensor:
    found = torch.randint(0, 29, (4, 6))
    found[:, 2] = torch.tensor(TOKENS)
    return found


def trained(base: nn.Module) -> nn.Module:
    """A converted copy of the base whose adapters have trained rows."""
    configs = {"a": rows(), "b": rows(), "c": lora(target_modules=["value"])}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f".*{LEAVES_OUT}")
        model = mx.convert_model(copy.deepcopy(base), configs)
    for name in "ab":
        for parameter in mx.adapter_parameters(model, name).values():
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model


def test_a_zero_bias_is_as_in_peft_unpatched() -> None:
    base, batch, configs = bert(0.0), ids(), {"a": rows(), "b": rows()}
    theirs, ours = peft_model(base, configs), mx.convert_model(copy.deepcopy(base), configs)
    copy_weights(theirs, ours, configs)
    mixed = ours(input_ids=batch, adapter_names=["a", "b", "__base__", "a"]).logits
    mixed.square().mean((1, 2)).sum().backward()
    for name, places in {"a": [0, 3], "b": [1]}.items():
        theirs.set_adapter(name)
        alone = theirs(input_ids=batch[places]).logits
        assert_same_up_to_rounding(mixed[places].detach(), alone.detach(), name)
        alone.square().mean((1, 2)).sum().backward()
        assert_same_gradients(ours, theirs, name)


def test_a_bias_is_kept_as_in_pefts_merged_model(tmp_path: Path) -> None:
    base, batch = bert(1.0), ids()
    model, names = trained(base), ["a", "b", "c", "__base__"]
    with torch.no_grad():
        mixed = model(input_ids=batch, adapter_names=names).logits
        for row, name in enumerate("ab"):
            mx.save_adapter(model, name, tmp_path / name)
            theirs = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / name))
            with pytest.warns(UserWarning, match=f"adapter 'default': {LEAVES_OUT}"):
                taken = mx.from_peft(copy.deepcopy(theirs))
            again = copy.deepcopy(base)
            with pytest.warns(UserWarning, match=f"adapter 'again': {LEAVES_OUT}"):
                mx.load_adapter(again, "again", tmp_path / name)
            merged = theirs.merge_and_unload()
            for what, other in {
                "PEFT's merged": merged,
                "from_peft": taken,
                "the folder here": again,
                "merged here": mx.merge_and_unload(model, name),
            }.items():
                found = other(input_ids=batch[row : row + 1]).logits[0]
                assert_same_up_to_rounding(found, mixed[row], what)
        plain = base(input_ids=batch[3:]).logits[0]
    assert_same_up_to_rounding(mixed[3], plain, "the base's rows")


def test_an_older_peft_is_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT 0.19, the oldest that is supported, makes the layer with tokens."""

    class Old(trainable_tokens.TrainableTokensLayer):
        def __init__(self, base_layer: nn.Module, adapter_name: str, token_indices: list[int]) -> None:
            super().__init__(base_layer, adapter_name, token_indices=token_indices)

    monkeypatch.setattr(trainable_tokens, "TrainableTokensLayer", Old)
    assert peft_drops_bias()


def test_warned_once_where_the_bias_has_numbers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mx.convert_model(bert(0.0), {"a": rows()})
        model = mx.convert_model(bert(1.0), {"plain": lora(target_modules=["query"])})
    state = torch.get_rng_state()
    with pytest.warns(UserWarning, match=LEAVES_OUT) as seen:
        mx.add_adapter(model, "b", rows())
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert torch.equal(torch.get_rng_state(), state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=LEAVES_OUT):
            mx.add_adapter(model, "c", rows())
    model(input_ids=ids(), adapter_names=["plain", "b", "c", "c"])
    mx.remove_adapter(model, "c")


@pytest.mark.parametrize("how", ["beside others", "first", "from_peft"])
def test_weights_are_read_before_a_warning_that_may_be_an_error(how: str, tmp_path: Path) -> None:
    base = bert(1.0)
    model = trained(base)
    mx.save_adapter(model, "a", tmp_path)
    again: Any = copy.deepcopy(base)
    if how == "from_peft":
        again = PeftModel.from_pretrained(again, str(tmp_path), adapter_name="a")
    elif how == "beside others":
        mx.convert_model(again, {"other": lora(target_modules=["value"])})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=LEAVES_OUT):
            mx.from_peft(again) if how == "from_peft" else mx.load_adapter(again, "a", tmp_path)
    ours = mx.adapter_parameters(again.get_base_model() if how == "from_peft" else again, "a")
    for key, expected in mx.adapter_parameters(model, "a").items():
        assert torch.equal(ours[key], expected), key


MESSAGE = r"^adapter 'a': trainable_token_indices: {} is a {} with quantised or sharded weights, whose rows"


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(70, 64), nn.Linear(64, 64), nn.Linear(64, 70)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(input_ids))))


class TorchLinear(nn.Module):
    """Has the name, buffers and sizes of gptqmodel's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = 64, 70, None
        self.register_buffer("qweight", torch.zeros(8, 70, dtype=torch.int32))


TorchLinear.__module__, TorchLinear.__name__ = "gptqmodel.nn_modules.qlinear.torch", "BaseQuantLinear"


def check_refused(model: nn.Module, target: str, kind: str) -> None:
    config = lora(target_modules=["body"], trainable_token_indices={target: [3, 60]})
    assert_refused(model, config, MESSAGE.format(target, kind))


def test_of_gptqmodel() -> None:
    model = Body()
    model.head = TorchLinear()
    check_refused(model, "head", "BaseQuantLinear")


def test_of_a_converted_layer() -> None:
    model = mx.convert_model(Body(), {"b": lora(target_modules=["head", "body"])})
    mx.set_frozen_weights(model, Rounded)
    mx.remove_adapter(model, "b")
    with pytest.raises(ValueError, match=MESSAGE.format("head", "Linear")):
        mx.add_adapter(model, "a", lora(target_modules=["body"], trainable_token_indices={"head": [3]}))


@pytest.mark.peers
@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_of_bitsandbytes(kind: str) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model: Any = Body()
    head = {
        "4bit": lambda: bnb.nn.Linear4bit(64, 70, quant_type="nf4"),
        "8bit": lambda: bnb.nn.Linear8bitLt(64, 70, has_fp16_weights=False, device="cpu"),
    }[kind]()
    head.load_state_dict(model.head.state_dict())
    model.head = head.to("cpu").requires_grad_(False)
    check_refused(model, "head", type(head).__name__)


@pytest.mark.peers
@pytest.mark.parametrize("target", ["head", "embed"])
def test_of_torchao(target: str) -> None:
    ao = pytest.importorskip("torchao.quantization")
    model = copy.deepcopy(Body()).requires_grad_(False)
    ao.quantize_(model, ao.Int8WeightOnlyConfig(), filter_fn=lambda module, name: name == target)
    assert type(model.get_submodule(target).weight.data) is not Tensor
    check_refused(model, target, "Linear" if target == "head" else "Embedding")


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
    assert_refused(build(), lora(**fields, ensure_weight_tying=True), re.escape(message))


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
