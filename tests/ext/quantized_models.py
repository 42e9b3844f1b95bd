"""What holds for models over every quantised base, whichever library made it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tolerances import assert_same_up_to_rounding
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import mlora_ext as mx

VOCABULARY = 61
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""All linear layers but the output head, which stays plain."""
Load = Callable[[], PreTrainedModel]


def save_llama(folder: Path) -> Path:
    """Saves a small Llama, of widths that blocks of 64 numbers divide."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def check_copies_casts_and_states(model: nn.Sequential, other: nn.Sequential, exact: bool = True) -> None:
    """A change of dtype leaves the scales alone, and a state loads into another model.

    `exact`: unless the library casts its scales.
    """
    before = model[0].frozen.dense()
    other.load_state_dict(copy.deepcopy(model).state_dict())
    assert torch.equal(other[0].frozen.dense(), before)
    half: Any = copy.deepcopy(model).to(torch.bfloat16)
    cast = half[0].frozen.dense()
    if exact:
        assert torch.equal(cast, before.to(cast.dtype))
    else:
        assert_same_up_to_rounding(cast.float(), before, "W", 1e-2)
    assert torch.equal(model[0].frozen.dense(), before)
    half.train()
    with mx.route(half, mx.SegmentLayout.from_lengths([7]), names=["a"]):
        assert half(torch.randn(7, 128).bfloat16()).dtype == torch.bfloat16


def check_doras_norms(model: nn.Sequential, other: nn.Sequential) -> None:
    """They are computed once for each optimizer step, and anew after a write to W.

    Args:
        model: one layer with a DoRA adapter `a` of rank 3.
        other: the same with another W.
    """
    norms, adapter = model[0].norms, mx.adapter_parameters(model, "a")

    def forward() -> torch.Tensor:
        with mx.route(model, mx.SegmentLayout.from_lengths([7]), names=["a"]):
            return model(torch.randn(7, 128))

    adam = torch.optim.AdamW(adapter.values(), lr=0.1)
    for step in range(2):
        for _ in range(3):
            forward().sum().backward()
        assert norms.computed == step + 1
        adam.step()
        adam.zero_grad()
    a, b = (next(p for key, p in adapter.items() if part in key) for part in ("lora_A", "lora_B"))
    for _ in range(2):
        forward()
        w = model[0].frozen.dense().float()
        expected = torch.linalg.vector_norm(w + 8 / 3 * (b @ a), dim=1)
        assert_same_up_to_rounding(norms._kept["a"].norms.float(), expected, "norms")
        base = {key: value for key, value in other.state_dict().items() if key.startswith("0.weight")}
        model.load_state_dict(base, strict=False)


def check_a_peft_model(load: Load, folder: Path) -> nn.Module:
    """It is taken over with its logits and gradients, and what is saved loads in PEFT and here.

    Returns what was made of it.
    """
    lora = LoraConfig(r=4, target_modules=EVERY, init_lora_weights=False)
    theirs = get_peft_model(load(), lora).train()
    model = mx.from_peft(copy.deepcopy(theirs))
    assert isinstance(model.lm_head, nn.Linear)
    ids = torch.randint(VOCABULARY, (3, 9))
    found, expected = (one(input_ids=ids, labels=ids) for one in (model, theirs))
    assert_same_up_to_rounding(found.logits, expected.logits, "logits")
    for one in (found, expected):
        one.loss.backward()
    gradients = [p.grad for p in theirs.parameters() if p.requires_grad]
    ours = mx.adapter_parameters(model, "default")
    assert len(gradients) == len(ours)
    for (name, parameter), gradient in zip(ours.items(), gradients, strict=True):
        assert_same_up_to_rounding(parameter.grad, gradient, name)
    mx.save_adapter(model, "default", folder)
    again = PeftModel.from_pretrained(load(), folder).train()
    assert_same_up_to_rounding(again(input_ids=ids).logits, found.logits, "logits of the folder")
    other = load()
    mx.load_adapter(other, "b", folder)
    with torch.no_grad():
        found = other.train()(input_ids=ids).logits
        assert_same_up_to_rounding(found, expected.logits, "logits of the folder here")
        assert other.generate(ids[:1], min_new_tokens=2, max_new_tokens=2, do_sample=False).shape == (1, 11)
    return model


def check_a_mixed_batch_with_dropout(load: Load) -> None:
    """Logits and gradients of an adapter are those that it has alone."""
    loras = {
        "a": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.4, init_lora_weights=False),
        "b": LoraConfig(r=7, target_modules=["q_proj"], lora_dropout=0.2, init_lora_weights=False),
    }
    ids, found = torch.randint(VOCABULARY, (4, 6)), []
    for rows in (slice(0, 4), slice(0, 2)):
        model = mx.convert_model(load(), loras, seed=5).train()
        logits = model(input_ids=ids[rows], adapter_names=["a", "a", "b", "__base__"][rows]).logits[:2]
        logits.square().sum().backward()
        found.append([logits.detach(), *(p.grad for p in mx.adapter_parameters(model, "a").values())])
    for together, alone in zip(*found, strict=True):
        assert_same_up_to_rounding(together, alone, "a")
