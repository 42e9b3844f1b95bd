"""Small models with heads, and adapters that train heads, embeddings and rows of them."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from tolerances import STEADY_EPSILON
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

import mlora_ext as mx
from mlora_ext.interop.peft_folder import adapter_state

VOCABULARY, LABELS, LENGTH = 61, 3, 7
TIED_HEAD = "base_model.model.lm_head.weight"
"""Where PEFT has a weight twice that both tied layers share; here the embedding has it."""
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


def llama(kind: Any = LlamaForCausalLM, **options: Any) -> nn.Module:
    return kind(LlamaConfig(**_SIZES, num_key_value_heads=2, num_labels=LABELS, **options))


def lora(**fields: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **fields})


def _task(task: str) -> dict[str, LoraConfig]:
    return {
        "a": lora(target_modules="all-linear", task_type=task),
        "b": lora(target_modules=["v_proj", "up_proj"]),
        "c": lora(task_type=task, modules_to_save=["norm"]),
    }


_ROWS = {
    "a": lora(target_modules=["q_proj", "embed_tokens"]),
    "b": lora(target_modules=["v_proj"], trainable_token_indices=[3, 5, 0, 9]),
    "c": lora(modules_to_save=["norm"]),
}
_HEADS = {
    "a": lora(modules_to_save=["lm_head"]),
    "b": lora(target_modules=["v_proj", "embed_tokens"], init_lora_weights=False),
    "c": lora(modules_to_save=["lm_head", "norm"]),
}
_BOTH = {
    "a": lora(trainable_token_indices={"embed_tokens": [3, 4, 7], "lm_head": [9, 4]}),
    "b": lora(trainable_token_indices={"embed_tokens": [3, 4], "lm_head": [3, 4]}),
    "c": lora(target_modules=["v_proj"]),
}
_TIES = {
    "a": lora(modules_to_save=["lm_head"], ensure_weight_tying=True),
    "b": lora(modules_to_save=["embed_tokens", "norm"], ensure_weight_tying=True),
    "c": lora(modules_to_save=["lm_head"]),
}


def gemma() -> nn.Module:
    return Gemma3ForCausalLM(Gemma3TextConfig(**_SIZES, head_dim=8, num_key_value_heads=2))


def roberta() -> nn.Module:
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return RobertaForSequenceClassification(RobertaConfig(**_SIZES, num_labels=LABELS, **still))


CASES: dict[str, Any] = {
    "SEQ_CLS": (lambda: llama(LlamaForSequenceClassification), _task("SEQ_CLS")),
    "roberta": (
        roberta,
        {
            "a": lora(target_modules="all-linear", task_type="SEQ_CLS"),
            "b": lora(target_modules=["key"]),
            "c": lora(target_modules=["query"], task_type="SEQ_CLS", modules_to_save=["LayerNorm"]),
        },
    ),
    "TOKEN_CLS": (lambda: llama(LlamaForTokenClassification), _task("TOKEN_CLS")),
    "QUESTION_ANS": (lambda: llama(LlamaForQuestionAnswering), _task("QUESTION_ANS")),
    "rows": (llama, _ROWS),
    "rows, tied": (lambda: llama(tie_word_embeddings=True), _ROWS),
    "rows, scaled and tied": (gemma, _ROWS),
    "heads, kept tied": (lambda: llama(tie_word_embeddings=True), _TIES),
    "heads, scaled and kept tied": (gemma, _TIES),
    "heads, kept tied where nothing is": (llama, _TIES),
    "heads": (llama, _HEADS),
    "heads, tied": (lambda: llama(tie_word_embeddings=True), _HEADS),
    "rows of both": (llama, _BOTH),
    "rows of both, tied": (lambda: llama(tie_word_embeddings=True), _BOTH),
    "embedding": (llama, {"a": lora(modules_to_save=["embed_tokens"]), "b": lora(), "c": lora()}),
}


def batch(model: nn.Module, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Two samples with the labels of the model's task."""

    def draw(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=generator)

    ids = 2 + draw(VOCABULARY - 2, 2, LENGTH)
    ids[0, 1:3] = torch.tensor([3, 5])
    kind = type(model).__name__
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "Question" in kind:
        return found | {"start_positions": draw(LENGTH, 2), "end_positions": draw(LENGTH, 2)}
    if "Causal" in kind:
        return found | {"labels": ids}
    return found | {"labels": draw(LABELS, 2) if "Sequence" in kind else draw(LABELS, 2, LENGTH)}


def loss_of(model: Any, output: Any, labels: Mapping[str, torch.Tensor], rows: slice) -> torch.Tensor:
    """The loss of some of a batch's samples, as the model computes it."""
    own = {key: value.clone() for key, value in labels.items()}
    if "start_positions" in own:
        return model.loss_function(output.start_logits[rows], output.end_logits[rows], **own)
    logits = output.logits[rows]
    if "Causal" in type(model).__name__:
        return model.loss_function(logits=logits, labels=own["labels"], vocab_size=VOCABULARY)
    return nn.functional.cross_entropy(logits.flatten(0, -2), own["labels"].flatten())


def assert_refused(model: nn.Module, config: LoraConfig, message: str) -> None:
    """Fails unless a conversion is refused with this message, and changes nothing."""
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        mx.convert_model(model, {"a": config})
    assert [type(module) for module in model.modules()] == before


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=3e-3, eps=STEADY_EPSILON)


def train_mixed(
    model: nn.Module, data: Mapping[str, list[dict[str, torch.Tensor]]]
) -> dict[str, list[float]]:
    """Trains all adapters in one batch, with a sample of the base model; returns their losses."""
    losses: dict[str, list[float]] = {name: [] for name in data}
    optimizers = [optimizer(mx.adapter_parameters(model, name).values()) for name in data]
    for each in zip(*data.values(), strict=True):
        ids = torch.cat([*(own["input_ids"] for own in each), each[0]["input_ids"][:1]])
        names = [name for name in data for _ in range(2)] + ["__base__"]
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), adapter_names=names)
        total = torch.zeros(())
        for place, (name, own) in enumerate(zip(data, each, strict=True)):
            labels = {key: v for key, v in own.items() if key not in ("input_ids", "attention_mask")}
            loss = loss_of(model, output, labels, slice(2 * place, 2 * place + 2))
            losses[name].append(loss.item())
            total = total + loss
        total.backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    return losses


def train_peft(
    base: nn.Module, folder: Path, data: list[dict[str, torch.Tensor]]
) -> tuple[PeftModel, list[float]]:
    """Trains an adapter of a folder alone, with PEFT."""
    model = PeftModel.from_pretrained(copy.deepcopy(base), str(folder), is_trainable=True)
    own, losses = optimizer(p for p in model.parameters() if p.requires_grad), []
    for each in data:
        loss = model(**each).loss
        loss.backward()
        own.step()
        own.zero_grad()
        losses.append(loss.item())
    return model, losses


def assert_same_training(
    model: nn.Module, name: str, start: Mapping[str, torch.Tensor], theirs: PeftModel
) -> None:
    """Fails unless an adapter's weights have changed as PEFT's, to 1e-4."""
    mine, expected = (
        adapter_state(model, name),
        get_peft_model_state_dict(theirs, save_embedding_layers=False),
    )
    config, tied = theirs.peft_config["default"], theirs.get_base_model().config.tie_word_embeddings
    once = tied and config.ensure_weight_tying and config.modules_to_save
    assert mine.keys() <= expected.keys()
    assert expected.keys() - mine.keys() == ({TIED_HEAD} if once else set())
    for key, value in mine.items():
        theirs_now = expected[key].to(value.device)
        change = (theirs_now - start[key].to(value.device)).norm()
        assert (value - theirs_now).norm() <= 1e-4 * change + 1e-5, key
