"""Trained rows of a head with a bias: PEFT leaves the bias out until it merges them; here it is kept."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from head_models import lora
from models import by_peft_key, copy_weights, peft_model, trained_parameters
from peft import LoraConfig, PeftModel
from peft.tuners import trainable_tokens
from tolerances import assert_same_up_to_rounding
from torch import nn
from transformers import BertConfig, BertForMaskedLM

import mlora_ext as mx
from mlora_ext.layers.row_head import peft_drops_bias

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
        state = trained_parameters(theirs)
        for key, parameter in by_peft_key(ours, name).items():
            assert_same_up_to_rounding(parameter.grad, state[key].grad, key)


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
