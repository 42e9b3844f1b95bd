"""Runs: the same losses as PEFT's, evaluation, early stop, what is written, and faults that stay alone."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mlora import train
from mlora.config.config_file import load_config, resolve_config
from mlora.engine.engine import Engine, StepResult
from mlora.errors import RunError
from mlora.run.reporter import Reporter
from mlora.store.run_folder import read_metrics
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from seam_runs import data_of, train_and_resume
from tiny_run import lines, losses, random_tokens, run_data, save_base, write_jsonl, write_run
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, get_scheduler

TRAINING_KEYS = {
    "adapter",
    "step",
    "loss",
    "tokens",
    "learning_rate",
    "grad_norm",
    "seconds",
    "peak_memory_bytes",
}


def only(data: dict[str, Any], name: str, folder: Path) -> dict[str, Any]:
    adapters = [adapter for adapter in data["adapters"] if adapter["name"] == name]
    return data | {"adapters": adapters, "output_dir": str(folder)}


class Collector(Reporter):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def warn(self, line: str) -> None:
        self.lines.append(line)

    def fault(self, line: str) -> None:
        self.lines.append(line)

    def changed(self, task: Any) -> None:
        self.lines.append(f"{task.name} {task.progress.state} {task.progress.message}")


def peft_losses(base: Path, init: Path, records: list[dict], adapter: dict[str, Any]) -> list[float]:
    """Train one adapter with PEFT in file order, as Transformers' Trainer would."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), init, is_trainable=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=adapter["learning_rate"], weight_decay=adapter["weight_decay"]
    )
    steps = adapter["max_steps"]
    schedule = get_scheduler(adapter["lr_scheduler_type"], optimizer, adapter["warmup_steps"], steps)
    size, result, place = adapter["per_device_train_batch_size"], [], 0
    for _ in range(steps):
        total, tokens = torch.zeros(()), 0
        for _ in range(size * adapter["gradient_accumulation_steps"]):
            record = records[place % len(records)]
            place += 1
            labels = torch.tensor(record["labels"][1:])
            logits = model(input_ids=torch.tensor([record["input_ids"]])).logits[0, :-1]
            total = total + cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            tokens += int((labels != -100).sum())
        loss = total / tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, adapter["max_grad_norm"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        result.append(loss.item())
    return result


def test_every_loss_is_that_of_peft_training_the_adapter_alone(tiny_base: Path, tmp_path: Path) -> None:
    records = {"x": random_tokens(7, seed=21), "y": random_tokens(5, seed=22, longest=25)}
    for name, rows in records.items():
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    shared = {"max_steps": 8, "shuffle": False, "optim": "adamw_torch"}
    adapters: list[dict[str, Any]] = [
        {
            "name": "x",
            "learning_rate": 2e-2,
            "lr_scheduler_type": "linear",
            "warmup_steps": 3,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "weight_decay": 0.1,
            "max_grad_norm": 0.05,
        },
        {
            "name": "y",
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 0,
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 1,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
        },
    ]
    loras = [
        LoraConfig(r=4, lora_alpha=16, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"]),
        LoraConfig(r=7, lora_alpha=3, target_modules=["o_proj", "gate_proj"]),
    ]
    for adapter, lora in zip(adapters, loras, strict=True):
        init = tmp_path / "init" / adapter["name"]
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_base), lora)
        model.save_pretrained(init)
        adapter |= {"dataset": adapter["name"], "init_from": str(init)}
    data = {
        "base_model": str(tiny_base),
        "output_dir": "run",
        "device": "cpu",
        "defaults": shared,
        "datasets": [{"name": name, "path": f"{name}.jsonl", "format": "tokens"} for name in records],
        "adapters": adapters,
    }
    train(resolve_config(data, folder=tmp_path))
    for adapter in adapters:
        expected = peft_losses(
            tiny_base, Path(adapter["init_from"]), records[adapter["name"]], shared | adapter
        )
        assert losses(tmp_path / "run", adapter["name"]) == pytest.approx(expected, abs=1e-5)
        assert max(expected) - min(expected) > 1e-3  # it did learn


def test_an_adapter_trains_as_it_would_alone(tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    train(resolve_config(data, folder=tmp_path))
    for name in ("first", "second"):
        alone = only(data, name, tmp_path / name)
        train(resolve_config(alone, folder=tmp_path))
        assert losses(tmp_path / "run", name) == pytest.approx(losses(tmp_path / name, name), rel=1e-5)


@pytest.mark.draws
def test_what_a_run_writes(tiny_base: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    result = train(path)
    assert result.exit_code == 0
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    training = [record for record in records if "loss" in record]
    assert all(set(record) == TRAINING_KEYS for record in training)
    assert [r["step"] for r in training if r["adapter"] == "first"] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in training if r["adapter"] == "second"] == list(range(1, 10))
    evaluations = [(record["adapter"], record["step"]) for record in records if "eval_loss" in record]
    assert evaluations == [("first", 0), ("first", 3), ("first", 6)]
    # linear decay without warm-up: the first step has the full rate
    rates = [record["learning_rate"] for record in training if record["adapter"] == "first"]
    assert rates == pytest.approx([5e-3 * (6 - step) / 6 for step in range(6)])

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary == result.summary()
    first = summary["adapters"]["first"]
    evals = [record["eval_loss"] for record in records if "eval_loss" in record]
    assert first["eval_loss"] == {"before": evals[0], "after": evals[-1]}
    assert first["tokens"] == sum(record["tokens"] for record in training if record["adapter"] == "first")
    resolved = load_config(tmp_path / "run" / "config.yaml")
    assert resolved == load_config(path).model_copy(update={"base_gemm": resolved.base_gemm})
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    for name, rank in (("first", 4), ("second", 7)):
        weights = load_file(tmp_path / "run" / "adapters" / name / "adapter_model.safetensors")
        key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        assert weights[key].shape == (rank, 32)


def test_tokens_are_the_trained_ones_of_the_whole_accumulated_batch(tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "two.jsonl").read_text().splitlines()]
    train(resolve_config(only(data, "second", tmp_path / "run"), folder=tmp_path))
    tokens = [r["tokens"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in r]
    counts = [sum(label != -100 for label in row["labels"][1:]) for row in rows]
    assert tokens == [sum(counts[(3 * step + row) % 7] for row in range(3)) for step in range(9)]


def test_epochs_give_the_steps_that_trainer_gives(tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0] |= {"max_steps": -1, "num_train_epochs": 2}
    result = train(resolve_config(only(data, "first", tmp_path / "run"), folder=tmp_path))
    # 11 samples by 2 are 6 micro-batches, by 3 are 2 steps an epoch
    assert result.adapters["first"].step == 4


def test_early_stop_ends_one_adapter(tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    # a rate of 0 never improves: the evaluation of step 1 sets the mark, those of 2 and 3 miss it
    data["adapters"][0] |= {"learning_rate": 0.0, "eval_steps": 1, "early_stopping_patience": 2}
    result = train(resolve_config(data, folder=tmp_path))
    assert result.exit_code == 0
    first = result.adapters["first"]
    assert (first.state, first.step) == ("finished", 3)
    assert first.message == "stopped early: eval_loss did not improve in 2 evaluations"
    assert first.eval_loss["after"] is not None
    assert (tmp_path / "run" / "adapters" / "first" / "adapter_model.safetensors").is_file()
    assert result.adapters["second"].step == 9


@pytest.mark.parametrize("evaluated", [False, True])
def test_an_adapter_whose_loss_is_not_a_number_stops_alone(
    tiny_base: Path, tmp_path: Path, evaluated: bool
) -> None:
    data = run_data(tiny_base, tmp_path)
    train(resolve_config(only(data, "second", tmp_path / "alone"), folder=tmp_path))
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "alone" / "adapters" / "second", broken)
    weights = load_file(broken / "adapter_model.safetensors")
    for bank in ("lora_A", "lora_B"):  # finite, and too large for what they are multiplied by
        weights[f"base_model.model.model.layers.1.self_attn.v_proj.{bank}.weight"].fill_(3e38)
    save_file(weights, broken / "adapter_model.safetensors", metadata={"format": "pt"})
    data["adapters"][0] |= {"lora": None, "init_from": str(broken)}
    if not evaluated:
        data["adapters"][0] |= {"eval_dataset": None, "eval_steps": None}

    said = Collector()
    result = train(resolve_config(data, folder=tmp_path), reporter=said)
    assert result.exit_code == 1
    assert (result.status, result.adapters["first"].state) == ("failed", "stopped")
    what = "eval_loss after step 0" if evaluated else "loss of step 1"
    message = f"the {what} is not a number"
    assert result.adapters["first"].message == message
    assert f"first stopped {message}" in said.lines
    assert losses(tmp_path / "run", "first") == []
    assert losses(tmp_path / "run", "second") == pytest.approx(losses(tmp_path / "alone", "second"), rel=1e-5)
    assert not (tmp_path / "run" / "adapters" / "first").exists()


def test_memory_that_runs_out_is_one_line(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(self: Engine, future: object, *, raises: bool) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB.")

    monkeypatch.setattr(Engine, "finish", no_memory)
    with pytest.raises(RunError, match="out of memory at iteration 1; lower per_device") as error:
        train(resolve_config(run_data(tiny_base, tmp_path), folder=tmp_path))
    assert "\n" not in str(error.value)


def test_steps_that_the_loss_scaler_skips_are_counted_and_marked(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Engine.optim_step

    def overflow_once(self: Engine, name: str) -> StepResult:
        done = own(self, name)
        return replace(done, grad_norm=float("inf"), skipped=True, finite=False) if done.step == 2 else done

    monkeypatch.setattr(Engine, "optim_step", overflow_once)
    result = train(resolve_config(run_data(tiny_base, tmp_path), folder=tmp_path))
    assert [adapter.step for adapter in result.adapters.values()] == [6, 9]
    records = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in r]
    assert all((r["grad_norm"] is None, r.get("skipped")) == (True, True) for r in records if r["step"] == 2)
    assert all(r["grad_norm"] > 0 and "skipped" not in r for r in records if r["step"] != 2)


def test_an_adapter_with_bad_data_is_refused_alone(tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    with open(tmp_path / "one.jsonl", "a") as file:
        file.write('{"input_ids": [1, 999]}\n')
    said = Collector()
    result = train(resolve_config(data, folder=tmp_path), reporter=said)
    assert result.exit_code == 1
    message = f"{tmp_path}/one.jsonl:12: token id 999 is outside the base model's vocabulary of 260"
    assert said.lines[0] == f"first: refused: {message}"
    assert (result.adapters["first"].state, result.adapters["first"].message) == ("refused", message)
    assert result.adapters["second"].state == "finished"
    with pytest.raises(RunError, match="every adapter was refused; nothing to train"):
        train(resolve_config(only(data, "first", tmp_path / "other"), folder=tmp_path))
    assert not (tmp_path / "other").exists()


def test_exact_match_before_and_after(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", seed=5, hidden=64)
    answers = {"a": "x", "b": "yy", "c": "z", "dd": "w"}
    rows = [{"prompt": f"{key}=", "completion": value} for key, value in answers.items()]
    write_jsonl(tmp_path / "d.jsonl", rows)
    write_jsonl(tmp_path / "never.jsonl", [{"prompt": "q", "completion": "no such thing"}])
    adapter = {"dataset": "d", "eval_exact_match": True, "lora": {"r": 8, "target_modules": "all-linear"}}
    data = {
        "base_model": str(base),
        "output_dir": "run",
        "device": "cpu",
        "defaults": {"max_steps": 60, "learning_rate": 2e-2, "per_device_train_batch_size": 4},
        "datasets": [
            {"name": "d", "path": "d.jsonl", "format": "prompt_completion"},
            {"name": "never", "path": "never.jsonl", "format": "prompt_completion"},
        ],
        "adapters": [
            adapter | {"name": "learns", "eval_dataset": "d"},
            adapter | {"name": "other", "eval_dataset": "never", "max_steps": 2},
        ],
    }
    result = train(resolve_config(data, folder=tmp_path))
    assert result.adapters["learns"].eval_exact_match == {"before": 0.0, "after": 1.0}
    assert result.adapters["other"].eval_exact_match == {"before": 0.0, "after": 0.0}


def test_exact_match_needs_prompts_with_tokens(tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    write_jsonl(tmp_path / "one.jsonl", [{"prompt": "", "completion": "x"}])
    data["datasets"][0]["format"] = "prompt_completion"
    data["adapters"][0] |= {"eval_dataset": "one", "eval_exact_match": True}
    result = train(resolve_config(data, folder=tmp_path))
    assert "has a prompt without tokens" in result.adapters["first"].message
    data["defaults"]["max_length"] = 2
    write_jsonl(tmp_path / "one.jsonl", [{"prompt": "a", "completion": "xyz"}])
    result = train(resolve_config(data | {"output_dir": "again"}, folder=tmp_path))
    assert "has no sample that fits in max_length" in result.adapters["first"].message


def test_bf16_and_gradient_checkpointing_train(tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path, bf16=True, gradient_checkpointing=True)
    train(resolve_config(data, folder=tmp_path))
    plain = run_data(tiny_base, tmp_path, output_dir=str(tmp_path / "plain"))
    train(resolve_config(plain, folder=tmp_path))
    for name in ("first", "second"):
        assert losses(tmp_path / "run", name) == pytest.approx(losses(tmp_path / "plain", name), rel=2e-2)
        weights = load_file(tmp_path / "run" / "adapters" / name / "adapter_model.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_datasets_that_no_adapter_names_are_not_read(tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    data["datasets"].append({"name": "unused", "path": "not-there.jsonl", "format": "text"})
    assert train(resolve_config(data, folder=tmp_path)).exit_code == 0


def test_one_warning_for_all_adapters_of_a_dataset(tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    data["defaults"]["max_length"] = 8
    said = Collector()
    train(resolve_config(data, folder=tmp_path), reporter=said)
    cut = [line for line in said.lines if "were cut" in line]
    assert len(cut) == 2  # one for each dataset, though `two` is read by both adapters


@pytest.mark.parametrize("stages", [1, 2])
def test_a_run_resumes_bit_for_bit_between_overflows(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    """The scaler's scale and the steps that it skipped go on: fp16 holds no gradient above 65504."""
    monkeypatch.setattr("mlora.optim.step_rule._INITIAL", 2.0**18)
    whole = train_and_resume(data_of(tiny_base, tmp_path, stages) | {"fp16": True}, tmp_path)
    for name in ("first", "second"):
        steps = [line for line in lines(whole) if line["adapter"] == name and "loss" in line]
        skipped = [bool(line.get("skipped")) for line in steps]
        assert skipped == sorted(skipped, reverse=True)
        assert 3 <= sum(skipped) < len(skipped)
