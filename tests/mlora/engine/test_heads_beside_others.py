"""Adapters with heads of their own beside others on an engine, and samples that do not fit them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.data.record import LabelledSample, Sample
from mlora.engine.engine import Engine
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from tiny_models import make, samples

import mlora_ext as mx

OPTIM = OptimConfig(1e-2, total_steps=4)
LORA: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}


def test_next_tokens_of_others_are_those_of_the_base_head() -> None:
    prompts = [[5, 6, 7], [8, 9]]
    alone = Engine(make("llama"), seed=1)
    alone.create_adapter("plain", LoraConfig(**LORA), OPTIM)
    engine = Engine(make("llama"), seed=1)
    engine.create_adapter("plain", LoraConfig(**LORA), OPTIM)
    engine.create_adapter("head", LoraConfig(**LORA, modules_to_save=["lm_head"]), OPTIM)
    asked = {"plain": prompts, "__base__": prompts}
    assert engine.next_tokens(asked) == alone.next_tokens(asked)
    assert len(engine.next_tokens({"head": prompts})["head"]) == 2


def test_a_module_with_converted_layers_in_it_is_copied() -> None:
    """The engine converts all linear layers of the base."""
    engine = Engine(make("llama"), seed=1)
    engine.create_adapter("a", LoraConfig(**LORA, modules_to_save=["mlp"]), OPTIM)
    before = {key: p.detach().clone() for key, p in mx.adapter_parameters(engine.model, "a").items()}
    assert any("mlp.modules_to_save.a.up_proj.weight" in key for key in before)
    engine.forward_backward({"a": samples(3, 9, seed=6)})
    engine.optim_step("a")
    assert all(not torch.equal(p, before[k]) for k, p in mx.adapter_parameters(engine.model, "a").items())


def test_copies_beside_a_half_precision_base_are_trained_in_fp32() -> None:
    model = make("llama").bfloat16()
    mx.convert_model(model, {"a": LoraConfig(**LORA, modules_to_save=["norm"])})
    own = mx.adapter_parameters(model, "a")
    assert {p.dtype for p in own.values()} == {torch.float32}
    merged = mx.merge_and_unload(model, "a")
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}


def test_samples_and_settings_that_do_not_fit_are_refused() -> None:
    engine = Engine(make("llama"), seed=1)
    classifier = LoraConfig(**LORA, task_type="SEQ_CLS")
    with pytest.raises(ValueError, match="adapter 'labels': a classifier has a loss of its own"):
        engine.create_adapter("labels", classifier, OPTIM, num_labels=3, objective="dpo")
    engine.create_adapter("labels", classifier, OPTIM, num_labels=3)
    engine.create_adapter("plain", LoraConfig(**LORA), OPTIM)
    good, bad = (LabelledSample((5, 6), (-100, label)) for label in (2, 3))
    assert engine.forward_backward({"labels": [good]})["labels"].units == 1
    with pytest.raises(ValueError, match="adapter 'labels': label 3 is outside of the 3 labels of its head"):
        engine.forward_backward({"labels": [bad]})
    with pytest.raises(ValueError, match="adapter 'plain': expected labels that are tokens"):
        engine.forward_backward({"plain": [good]})
    with pytest.raises(ValueError, match="adapter 'labels': expected a LabelledSample, got a Sample"):
        engine.forward_backward({"labels": [Sample((5, 6), (5, 6))]})
    with pytest.raises(ValueError, match="adapter 'x': inference_mode=True"):
        engine.create_adapter("x", LoraConfig(**LORA, inference_mode=True), OPTIM)


def test_kinds_that_an_embedding_does_not_serve_change_nothing() -> None:
    model = make("llama")
    with pytest.raises(
        ValueError, match=r"adapter 'a': layer model.embed_tokens is of class Embedding, .*use_dora=True"
    ):
        mx.convert_model(model, {"a": LoraConfig(use_dora=True, target_modules=["embed_tokens", "q_proj"])})
    assert not any(isinstance(module, mx.MultiLoRALinear) for module in model.modules())


HEADS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"num_labels": 7}, "num_labels: needs task_type SEQ_CLS or TOKEN_CLS"),
    ({}, {"problem_type": "regression"}, "problem_type: needs task_type SEQ_CLS"),
    ({"task_type": "QUESTION_ANS"}, {"num_labels": 5}, "num_labels: needs task_type SEQ_CLS or TOKEN_CLS"),
    (
        {"task_type": "TOKEN_CLS"},
        {"num_labels": 3, "problem_type": "regression"},
        "problem_type: needs task_type SEQ_CLS",
    ),
    ({"task_type": "SEQ_CLS"}, {"num_labels": 0}, "num_labels: expected a whole number of at least 1, got 0"),
    (
        {"task_type": "SEQ_CLS"},
        {"num_labels": "3"},
        "num_labels: expected a whole number of at least 1, got '3'",
    ),
    ({"task_type": "SEQ_CLS"}, {}, "num_labels: task_type SEQ_CLS needs the number of labels; 1 for a regr"),
    (
        {"task_type": "SEQ_CLS"},
        {"num_labels": 1, "problem_type": "single_label_classification"},
        "num_labels: task_type SEQ_CLS needs at least 2 labels, got 1",
    ),
    (
        {"task_type": "TOKEN_CLS"},
        {"num_labels": 1},
        "num_labels: task_type TOKEN_CLS needs at least 2",
    ),
]


def test_labels_that_a_task_does_not_have_are_refused() -> None:
    engine = Engine(make("llama"))
    for fields, labels, message in HEADS:
        with pytest.raises(ValueError, match=f"^adapter 'x': {message}"):
            engine.create_adapter("x", LoraConfig(**LORA, **fields), OPTIM, **labels)
    assert engine.adapters == []


def test_labels_of_a_folder_are_kept(tmp_path: Path) -> None:
    engine, several = Engine(make("llama")), "multi_label_classification"
    classifier = LoraConfig(**LORA, task_type="SEQ_CLS")
    engine.create_adapter("a", classifier, OPTIM, num_labels=3, problem_type=several)
    engine.save("a", tmp_path)
    engine.create_adapter("b", classifier, OPTIM, init_from=tmp_path)
    sample = LabelledSample.of_sequence((5, 6), 0, 1.0, 0.0, 1.0)
    found = engine.evaluate({"a": [sample], "b": [sample]})
    assert found["a"] == found["b"]
    for lora in (None, classifier):
        with pytest.raises(ValueError, match="num_labels: is 4, but that of the head in init_from is 3"):
            engine.create_adapter("c", lora, OPTIM, init_from=tmp_path, num_labels=4)
    engine.create_adapter("d", classifier, OPTIM, init_from=tmp_path, label_names=["x", "y", "z"])
    engine.save("d", tmp_path / "d")
    labels = json.loads((tmp_path / "d" / "labels.json").read_text())
    assert labels == {"problem_type": several, "id2label": {"0": "x", "1": "y", "2": "z"}}
    engine.create_adapter("e", None, OPTIM, init_from=tmp_path / "d", label_names=["x", "y", "z"])
    with pytest.raises(ValueError, match="adapter 'c': label_names: has 2 names, but num_labels is 3"):
        engine.create_adapter("c", None, OPTIM, init_from=tmp_path, label_names=["x", "y"])
    (tmp_path / "labels.json").write_text('{"problem_type": "regression"}')
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"task_type": "TOKEN_CLS"}))
    with pytest.raises(ValueError, match="adapter 'c': problem_type: task_type TOKEN_CLS has no regression"):
        engine.load("c", tmp_path, OPTIM)
    assert engine.adapters == ["a", "b", "d", "e"]


def test_next_tokens_of_heads_that_predict_no_single_label_are_refused() -> None:
    engine, prompts = Engine(make("llama"), seed=1), [[5, 6, 7], [8, 9]]
    engine.create_adapter("tags", LoraConfig(**LORA, task_type="TOKEN_CLS"), OPTIM, num_labels=3)
    engine.create_adapter("answers", LoraConfig(**LORA, task_type="QUESTION_ANS"), OPTIM)
    engine.create_adapter("number", LoraConfig(**LORA, task_type="SEQ_CLS"), OPTIM, num_labels=1)
    for label, prompt in zip(engine.next_tokens({"tags": prompts})["tags"], prompts, strict=True):
        labels = [*[-100] * (len(prompt) - 1), label]
        sample = LabelledSample(tuple(prompt), tuple(labels))
        assert engine.evaluate({"tags": [sample]})["tags"].metrics["accuracy"] == 1
    for name in ("answers", "number"):
        with pytest.raises(ValueError, match=f"^adapter '{name}': its head predicts neither a token nor one"):
            engine.next_tokens({name: prompts})
