"""Heads, embeddings and tokens per adapter in runs: as PEFT alone, over stages, resumed, and refused."""

import copy
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.config.config_file import resolve_config
from mlora.data.record import AnswerSample, LabelledSample, Sample
from mlora.engine.dry_run import DryStage
from mlora.engine.engine import Engine
from mlora.engine.stage_group import StageOptions, spans_of
from mlora.optim.optim_config import OptimConfig
from mlora.run.run import resume, train
from mlora.store.run_folder import read_metrics
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft_alone import padded
from safetensors.torch import load_file
from test_resume import Interrupting
from tiny_models import make, samples
from tiny_run import random_tokens, write_jsonl
from tolerances import STEADY_EPSILON
from torch import nn
from transformers import (
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedModel,
)


def lora(num_labels: int | None = None, problem_type: str | None = None, **fields: Any) -> LoraConfig:
    plain = {"r": 4, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"}
    config = LoraConfig(**{**plain, **fields})
    labels = {"num_labels": num_labels, "problem_type": problem_type}
    config.__dict__.update({key: value for key, value in labels.items() if value is not None})
    return config


LORAS = {
    "head": lora(modules_to_save=["lm_head"]),
    "norm": lora(modules_to_save=["norm"], target_modules="all-linear"),
    "embed": lora(target_modules=["q_proj", "embed_tokens"]),
    "rows": lora(trainable_token_indices=[3, 5, 7, 11]),
    "seq": lora(task_type="SEQ_CLS", num_labels=3),
    "seq5": lora(task_type="SEQ_CLS", num_labels=5, target_modules="all-linear"),
    "tok": lora(task_type="TOKEN_CLS", num_labels=4),
    "number": lora(task_type="SEQ_CLS", num_labels=1),
    "numbers": lora(task_type="SEQ_CLS", num_labels=2, problem_type="regression"),
    "many": lora(task_type="SEQ_CLS", num_labels=5, problem_type="multi_label_classification"),
    "answer": lora(task_type="QUESTION_ANS", target_modules="all-linear"),
    "plain": lora(),
    "low-rank head": lora(target_modules=["q_proj", "lm_head"]),
    "tied head": lora(modules_to_save=["lm_head"], ensure_weight_tying=True),
}
Steps = Sequence[Sequence[Sample]]


def drawn(name: str, steps: int, batch: int = 2) -> Steps:
    """Micro-batches of an adapter, with labels if it classifies."""
    draw = torch.Generator().manual_seed(sum(map(ord, name)))
    found: list[Sample] = []
    for sample in samples(batch * steps, 12, seed=sum(map(ord, name))):
        ids, labels = sample.input_ids, getattr(LORAS[name], "num_labels", None)
        if name == "answer":
            places = torch.randint(0, len(ids), (2,), generator=draw).sort().values.tolist()
            found.append(AnswerSample.of_answer(ids, *places))
        elif name.startswith("number"):
            values = torch.randn(labels, generator=draw).tolist()
            found.append(LabelledSample.of_sequence(ids, 0, *values))
        elif name == "many":
            flags = torch.randint(0, 2, (labels,), generator=draw).tolist()
            found.append(LabelledSample.of_sequence(ids, 0, *flags))
        else:
            count = len(ids) if name == "tok" else 1
            own = [] if labels is None else torch.randint(0, labels, (count,), generator=draw).tolist()
            found.append(LabelledSample(ids, (*[-100] * (len(ids) - len(own)), *own)) if own else sample)
    return [found[i : i + batch] for i in range(0, len(found), batch)]


def tied(base: PreTrainedModel) -> PreTrainedModel:
    base.config.tie_word_embeddings = True
    base.lm_head.weight = base.model.embed_tokens.weight
    return base


def optim(steps: int) -> OptimConfig:
    kept = {"lr_scheduler_type": "constant", "max_grad_norm": 0.5, "adam_epsilon": STEADY_EPSILON}
    return OptimConfig(3e-3, total_steps=steps, **kept)


def trained(
    base: PreTrainedModel, names: Sequence[str], steps: int, folder: Path, *, stages: int = 1
) -> dict[str, list[float]]:
    """Trains adapters together; saves each before (`NAME-0`) and after (`NAME-1`); returns their losses."""
    engine = Engine(copy.deepcopy(base), stages=stages)
    try:
        for name in names:
            engine.create_adapter(name, copy.deepcopy(LORAS[name]), optim(steps))
            engine.save(name, folder / f"{name}-0")
        data = {name: drawn(name, steps) for name in names}
        losses: dict[str, list[float]] = {name: [] for name in names}
        for step in range(steps):
            found = engine.forward_backward({name: data[name][step] for name in names}, ends=names)
            for name in names:
                losses[name].append(found[name].loss_sum / found[name].units)
                engine.optim_step(name)
        for name in names:
            engine.save(name, folder / f"{name}-1")
        return losses
    finally:
        engine.close()


def peft_base(base: PreTrainedModel, config: LoraConfig) -> nn.Module:
    """The class that Transformers has for the adapter's task, over the same base."""
    kinds = {
        "SEQ_CLS": LlamaForSequenceClassification,
        "TOKEN_CLS": LlamaForTokenClassification,
        "QUESTION_ANS": LlamaForQuestionAnswering,
    }
    if config.task_type not in kinds:
        return copy.deepcopy(base)
    own = copy.deepcopy(base.config)
    own.num_labels, own.pad_token_id, own.classifier_dropout = getattr(config, "num_labels", 2), 0, 0.0
    own.problem_type = getattr(config, "problem_type", None)
    model = kinds[config.task_type](own)
    model.base_model.load_state_dict(base.model.state_dict())
    return model


def peft_loss(model: nn.Module, config: LoraConfig, batch: Sequence[Sample]) -> torch.Tensor:
    """The loss as the model has it; of answers one by one, since there padding takes part."""
    if config.task_type == "QUESTION_ANS":
        ends = ("start_positions", "end_positions")
        found = [
            model(
                torch.tensor([sample.input_ids]),
                **{key: torch.tensor([place]) for key, place in zip(ends, sample.facts, strict=True)},
            ).loss
            for sample in batch
        ]
        return torch.stack(found).mean()
    given = padded([Sample(sample.input_ids, sample.labels) for sample in batch])
    if config.task_type == "CAUSAL_LM":
        return model(**given, num_items_in_batch=sum(sample.trained_tokens for sample in batch)).loss
    if config.task_type == "SEQ_CLS":
        values = [sample.facts or sample.labels[-1] for sample in batch]
        given["labels"] = torch.tensor(values, dtype=torch.float if batch[0].facts else None)
    return model(**given).loss


NIGHT = pytest.mark.nightly
EVERY = [name for name in LORAS if name not in ("low-rank head", "tied head")]  # not beside the others
NAMES = [name for name in EVERY if name != "rows"]


@pytest.mark.parametrize(
    ("names", "steps", "stages", "is_tied"),
    [
        (["head", "embed", "seq", "rows"], 4, 1, False),
        (["norm", "rows", "tok"], 4, 1, True),
        (["head", "tied head", "seq", "plain"], 4, 1, True),
        (["head", "rows", "seq", "plain"], 4, 2, False),
        (["rows", "plain", "tok"], 4, 2, True),
        (["head", "embed", "plain"], 4, 2, True),
        (["low-rank head", "plain"], 4, 2, True),
        (["answer", "many", "number"], 4, 1, False),
        (["answer", "numbers", "head", "plain"], 4, 2, False),
        pytest.param(EVERY, 25, 1, False, marks=NIGHT),
        pytest.param(EVERY, 25, 2, False, marks=NIGHT),
        pytest.param([name for name in EVERY if name != "head"], 25, 1, True, marks=NIGHT),
        pytest.param([name for name in EVERY if name != "head"], 25, 2, True, marks=NIGHT),
        pytest.param(NAMES, 25, 2, True, marks=NIGHT),
    ],
)
def test_as_peft_trains_each_alone(
    names: list[str], steps: int, stages: int, is_tied: bool, tmp_path: Path
) -> None:
    base = tied(make("llama")) if is_tied else make("llama")
    losses = trained(base, names, steps, tmp_path, stages=stages)
    for name in names:
        own = peft_base(base, LORAS[name])
        theirs = PeftModel.from_pretrained(own, str(tmp_path / f"{name}-0"), is_trainable=True).train()
        parameters = [p for p in theirs.parameters() if p.requires_grad]
        stepping = torch.optim.AdamW(parameters, lr=3e-3, eps=STEADY_EPSILON, weight_decay=0.0)
        for step, batch in enumerate(drawn(name, steps)):
            loss = peft_loss(theirs, LORAS[name], batch)
            assert losses[name][step] == pytest.approx(loss.item(), abs=1e-5), name
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            stepping.step()
            stepping.zero_grad()
        before, after = (
            load_file(tmp_path / f"{name}-{when}" / "adapter_model.safetensors") for when in (0, 1)
        )
        expected = get_peft_model_state_dict(theirs, save_embedding_layers=False)
        assert expected.keys() == after.keys()
        for key, value in after.items():
            change = (expected[key] - before[key]).norm()
            assert (value - expected[key]).norm() <= 1e-4 * change + 1e-6, (name, key)


def test_alone_as_together_with_dropout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("head", "embed", "seq", "answer"):
        dropping = copy.deepcopy(LORAS[name])
        dropping.lora_dropout = 0.3
        monkeypatch.setitem(LORAS, name, dropping)
    base, names = make("llama"), ["head", "embed", "seq", "answer", "plain"]
    together = trained(base, names, 3, tmp_path)
    for name in ("head", "embed", "seq", "answer"):
        alone = trained(base, [name], 3, tmp_path / "alone")
        assert alone[name] == pytest.approx(together[name], abs=1e-5)


@pytest.mark.parametrize("labels", [["seq"], ["answer", "many", "number"]])
def test_memory_is_forecast(labels: list[str]) -> None:
    base = make("llama")
    options = StageOptions(torch.device("cpu"), torch.float32)
    names = ["head", "rows", *labels]
    loras = {name: LORAS[name] for name in names}
    parts = [DryStage(base, options, span) for span in spans_of(2, base.config.num_hidden_layers)]
    whole = DryStage(base, options)
    for name in names:
        states = [part.states(LORAS[name], optim(1)) for part in parts]
        assert sum(state.gradients for state in states) == whole.states(LORAS[name], optim(1)).gradients
    head, plain = (whole.states(LORAS[name], optim(1)).gradients for name in ("head", "plain"))
    assert head - plain == base.lm_head.weight.nbytes
    engine = Engine(copy.deepcopy(base))
    for name in names:
        engine.create_adapter(name, copy.deepcopy(LORAS[name]), optim(1))
    own = {name: drawn(name, 1)[0] for name in names}
    future = engine.start(own, measure=True)
    engine.finish(future)
    lengths = {name: [sample.rows for sample in batch] for name, batch in own.items()}
    (dry,) = whole.activations(loras, [lengths])
    assert dry == pytest.approx(future.measured[0].phases[0], rel=0.1)


def run_data(base: Path, folder: Path) -> dict[str, Any]:
    """A run with a classifier, a trained head, and trained rows."""
    tokens = random_tokens(9, 1)
    write_jsonl(folder / "tokens.jsonl", tokens)
    labelled = [{"input_ids": line["input_ids"], "label": row % 3} for row, line in enumerate(tokens)]
    write_jsonl(folder / "labels.jsonl", labelled)
    low = {"r": 2, "target_modules": ["q_proj"]}
    return {
        "base_model": str(base),
        "output_dir": str(folder / "run"),
        "seed": 3,
        "device": "cpu",
        "base_gemm": "aten",
        "defaults": {
            "max_steps": 4,
            "learning_rate": 5e-3,
            "save_steps": 2,
            "gradient_accumulation_steps": 2,
            "per_device_train_batch_size": 2,
        },
        "datasets": [
            {"name": "tokens", "path": "tokens.jsonl", "format": "tokens"},
            {"name": "labels", "path": "labels.jsonl", "format": "classification"},
        ],
        "adapters": [
            {
                "name": "kinds",
                "dataset": "labels",
                "eval_dataset": "labels",
                "eval_steps": 2,
                "num_labels": 3,
                "metric_for_best_model": "accuracy",
                "lora": {**low, "task_type": "SEQ_CLS", "lora_dropout": 0.2},
            },
            {"name": "head", "dataset": "tokens", "lora": {**low, "modules_to_save": ["lm_head"]}},
            {"name": "rows", "dataset": "tokens", "lora": {**low, "trainable_token_indices": [5, 9, 12]}},
        ],
    }


def weights(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.glob("adapters/*/*.safetensors")}


def test_a_run_resumes_bit_for_bit_and_two_stages_are_one(tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    train(resolve_config(data | {"output_dir": "whole"}, folder=tmp_path))
    result = train(resolve_config(data, folder=tmp_path), reporter=Interrupting(7))
    assert result.status == "interrupted"
    assert resume(tmp_path / "run").exit_code == 0
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert len(weights(tmp_path / "run")) == 3
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "eval_loss" in line]
    assert all(0 <= line["eval_accuracy"] <= 1 for line in lines)
    assert any(line.get("best") == "eval_accuracy" for line in lines)
    engines = [trained(make("llama"), ["seq", "head", "rows"], 2, tmp_path, stages=n) for n in (1, 2)]
    for name, losses in engines[0].items():
        assert losses == pytest.approx(engines[1][name], abs=1e-6)
    again = copy.deepcopy(data)
    again["adapters"] = [
        {
            "name": "kinds",
            "dataset": "labels",
            "num_labels": 3,
            "init_from": str(tmp_path / "run/adapters/kinds"),
        }
    ]
    again["output_dir"] = "again"
    assert train(resolve_config(again, folder=tmp_path)).adapters["kinds"].state == "finished"
    shutil.rmtree(tmp_path / "again")
    again["adapters"][0]["num_labels"] = 5
    again["adapters"].append(data["adapters"][1])
    refused = train(resolve_config(again, folder=tmp_path)).adapters["kinds"]
    assert "num_labels: is 5, but that of the head in init_from is 3" in refused.message


def change(key: str, value: Any, index: int = 0) -> Callable[[dict[str, Any]], None]:
    def made(data: dict[str, Any]) -> None:
        *parents, last = key.split(".")
        place = data["adapters"][index]
        for parent in parents:
            place = place[parent]
        if value is None:
            place.pop(last)
        else:
            place[last] = value

    return made


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (change("num_labels", None), "num_labels: task_type SEQ_CLS needs the number of labels"),
        (change("num_labels", 2), "labels.jsonl:3: 'label': label 2 is outside of 0 to 1 (num_labels: 2)"),
        (change("dataset", "tokens"), "task_type SEQ_CLS needs format classification, got 'tokens'"),
        (change("dataset", "labels", 1), "format classification needs lora.task_type: SEQ_CLS or TOKEN_CLS"),
        (change("problem_type", "regression", 1), "problem_type: needs task_type SEQ_CLS"),
        (change("num_labels", 3, 1), "num_labels: needs task_type SEQ_CLS or TOKEN_CLS"),
        (change("lora.task_type", "QUESTION_ANS"), "task_type QUESTION_ANS needs format question_answering"),
        (change("lora.task_type", "TOKEN_CLS"), "labels.jsonl:1: 'labels' is missing: task_type TOKEN_CLS"),
        (change("problem_type", "regression"), "metric_for_best_model: a regression has no accuracy"),
        (change("lora.modules_to_save", ["lm_heat"], 1), "'lm_heat' matches nothing"),
        (change("lora.trainable_token_indices", [260], 2), "token 260 is outside of model.embed_tokens"),
    ],
)
def test_refused_in_one_line(tiny_base: Path, tmp_path: Path, changed: Any, message: str) -> None:
    data = run_data(tiny_base, tmp_path)
    changed(data)
    result = train(resolve_config(data, folder=tmp_path))
    (line,) = [one.message for one in result.adapters.values() if one.state == "refused"]
    assert message in line
    assert "\n" not in line
    assert sorted(one.state for one in result.adapters.values()) == ["finished", "finished", "refused"]


def test_tied_copies_need_one_stage_and_count_once() -> None:
    base = tied(make("llama"))
    engine = Engine(copy.deepcopy(base), stages=2)
    with pytest.raises(ValueError, match=r"ensure_weight_tying: lm_head is tied to model\.embed_tokens, and"):
        engine.create_adapter("tied head", copy.deepcopy(LORAS["tied head"]), optim(1))
    engine.create_adapter("plain", copy.deepcopy(LORAS["plain"]), optim(1))
    engine.close()
    options = StageOptions(torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match=r"^ensure_weight_tying: lm_head is tied to"):
        DryStage(base, options, spans_of(2, base.config.num_hidden_layers)[0]).states(
            LORAS["tied head"], optim(1)
        )
    whole = DryStage(base, options)
    own, plain = (whole.states(LORAS[name], optim(1)).gradients for name in ("tied head", "plain"))
    assert own - plain == base.lm_head.weight.nbytes
    engine = Engine(base)
    engine.create_adapter("tied head", copy.deepcopy(LORAS["tied head"]), optim(1))
    batch = drawn("tied head", 1)[0]
    future = engine.start({"tied head": batch}, measure=True)
    engine.finish(future)
    (dry,) = whole.activations({"tied head": LORAS["tied head"]}, [{"tied head": [s.rows for s in batch]}])
    assert dry == pytest.approx(future.measured[0].phases[0], rel=0.1)


@pytest.mark.parametrize("names", [("seq", "low-rank head"), ("low-rank head", "seq")])
def test_classifiers_are_not_mixed_with_low_rank_parts_on_the_head(names: tuple[str, str]) -> None:
    engine = Engine(make("llama"))
    engine.create_adapter(names[0], copy.deepcopy(LORAS[names[0]]), optim(1))
    with pytest.raises(ValueError, match=r"classifiers \(task_type\) cannot be trained beside"):
        engine.create_adapter(names[1], copy.deepcopy(LORAS[names[1]]), optim(1))
    engine.create_adapter("plain", copy.deepcopy(LORAS["plain"]), optim(1))
    engine.close()


@pytest.mark.filterwarnings("ignore:.*leaves the bias of lm_head out")
@pytest.mark.parametrize("stages", [1, 2])
def test_rows_of_a_head_with_a_bias_are_as_in_pefts_merged_model(stages: int, tmp_path: Path) -> None:
    base = make("llama")
    base.lm_head.bias = nn.Parameter(torch.randn(base.config.vocab_size))
    base, data = tied(base), drawn("rows", 2)
    losses = trained(base, ["rows", "plain"], 2, tmp_path, stages=stages)["rows"]
    for steps, loss in enumerate(losses):
        if steps:
            trained(base, ["rows", "plain"], steps, tmp_path, stages=stages)
        theirs = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / f"rows-{min(steps, 1)}"))
        expected = peft_loss(theirs.merge_and_unload(), LORAS["rows"], data[steps])
        assert loss == pytest.approx(expected.item(), abs=1e-5)
