"""Heads for answers over several families: their folders over Transformers' classes, in PEFT and here."""

import copy
import json
from pathlib import Path

import pytest
import torch
from mlora.data.record import AnswerSample, LabelledSample
from mlora.engine.engine import Engine
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from tiny_models import make
from transformers import AutoModelForQuestionAnswering

import mlora_ext as mx

OPTIM = OptimConfig(1e-2, total_steps=4)
SAMPLES = [AnswerSample.of_answer((5, 6, 7, 8), 1, 2), AnswerSample.of_answer((9, 4, 3), 0, 2)]
LORA = {"r": 2, "task_type": "QUESTION_ANS", "init_lora_weights": False}
IN_BLOCK = {
    "llama": r"model\.layers\.0\..*q_proj",
    "qwen3": r"model\.layers\.1\..*down_proj",
    "mistral": r"model\.layers\.0\..*q_proj",
    "gpt2": r"transformer\.h\.0\..*c_proj",
}


@pytest.mark.parametrize("family", [*IN_BLOCK])
def test_a_folder_gives_the_same_loss_over_the_models_own_class(family: str, tmp_path: Path) -> None:
    base = make(family)
    engine = Engine(copy.deepcopy(base), seed=2)
    config = LoraConfig(
        **LORA, target_modules=IN_BLOCK[family], modules_to_save=["wte"] if family == "gpt2" else None
    )
    engine.create_adapter("a", config, OPTIM)
    engine.forward_backward({"a": SAMPLES})
    engine.optim_step("a")
    found = engine.evaluate({"a": SAMPLES})["a"]
    engine.save("a", tmp_path / "a")
    whole = AutoModelForQuestionAnswering.from_config(base.config).eval()
    whole.base_model.load_state_dict(base.base_model.state_dict())
    theirs = PeftModel.from_pretrained(copy.deepcopy(whole), str(tmp_path / "a")).eval()
    keys = {f"base_model.model.{key}" for key in whole.state_dict()}
    stored = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert {key for key in stored if "lora_" not in key and "wte" not in key} <= keys
    ours = mx.convert_model(whole, {})
    mx.load_adapter(ours, "a", tmp_path / "a")
    for model, more in ((theirs, {}), (ours.eval(), {"adapter_names": ["a"]})):
        losses = [
            model(
                torch.tensor([sample.input_ids]),
                start_positions=torch.tensor([int(sample.values[0])]),
                end_positions=torch.tensor([int(sample.values[1])]),
                **more,
            ).loss.item()
            for sample in SAMPLES
        ]
        assert found.loss == pytest.approx(sum(losses) / 2, abs=1e-5)
    engine.load("again", tmp_path / "a", OPTIM)
    assert engine.evaluate({"again": SAMPLES})["again"].loss == pytest.approx(found.loss, abs=1e-6)
    engine.close()


def test_a_family_without_such_a_class_is_refused() -> None:
    engine = Engine(make("cohere"))
    with pytest.raises(ValueError, match="QUESTION_ANS: cohere has no AutoModelForQuestionAnswering"):
        engine.create_adapter("a", LoraConfig(**LORA, target_modules=["q_proj"]), OPTIM)


def test_samples_that_do_not_fit_their_head_are_refused(tmp_path: Path) -> None:
    engine = Engine(make("llama"))
    engine.create_adapter("answers", LoraConfig(**LORA, target_modules=["q_proj"]), OPTIM)
    low = {"r": 2, "target_modules": ["q_proj"], "task_type": "SEQ_CLS"}
    engine.create_adapter("number", LoraConfig(**low), OPTIM, num_labels=1)
    several = "multi_label_classification"
    engine.create_adapter("several", LoraConfig(**low), OPTIM, num_labels=3, problem_type=several)
    ids = (5, 6, 7)
    cases = {
        "answers": [
            (LabelledSample.of_sequence(ids), "expected label 0 for each token of a sample with an answer"),
            (AnswerSample.of_answer(ids, 1, 3), r"first and last token of 3, got \[1, 3\]"),
            (AnswerSample.of_answer(ids, 1, 2).cut(2), "expected label 0 for each token"),
        ],
        "number": [
            (LabelledSample.of_sequence(ids), "expected 1 values of a sample, got 0"),
            (LabelledSample.of_sequence(ids, 0, float("inf")), "expected finite values"),
            (LabelledSample(ids, (0, 0, 0), (1.0,)), "expected label 0 for one token"),
        ],
        "several": [(LabelledSample.of_sequence(ids, 0, 1, 0.5, 0), "expected values of 0 or 1, got 0.5")],
    }
    for name, each in cases.items():
        for sample, message in each:
            with pytest.raises(ValueError, match=f"adapter '{name}': .*{message}"):
                engine.forward_backward({name: [sample]})
    with pytest.raises(ValueError, match=r"problem_type: expected one of regression, .*, got 'several'"):
        engine.create_adapter("x", LoraConfig(**low), OPTIM, num_labels=3, problem_type="several")
    engine.save("several", tmp_path / "several")
    assert json.loads((tmp_path / "several" / "labels.json").read_text()) == {"problem_type": several}
    engine.load("again", tmp_path / "several", OPTIM)
    found = engine.evaluate(
        {name: [LabelledSample.of_sequence(ids, 0, 1, 0, 1)] for name in ("several", "again")}
    )
    assert found["several"] == found["again"]
    (tmp_path / "several" / "labels.json").write_text('{"id2label": {"0": "a"}}')
    with pytest.raises(ValueError, match=r"labels\.json: id2label must name the labels 0 to 2 of the head"):
        engine.load("third", tmp_path / "several", OPTIM)
    engine.close()
