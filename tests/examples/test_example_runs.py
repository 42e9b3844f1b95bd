"""The example configs and scripts train with a few steps, and what they show is true."""

import copy
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import callbacks
import experts
import make_tasks
import mlora
import own_pipeline
import pytest
import torch
from drop_in import read_lines
from mlora.config.config_file import load_config, resolve_config
from mlora.config.yaml_file import read_yaml
from mlora.run.run import RunResult
from mlora.store.run_folder import read_metrics
from peft import LoftQConfig, LoraConfig, PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import mlora_ext as mx

EXAMPLES = Path(make_tasks.__file__).parent
BASE = EXAMPLES / "tiny-base"
TWO_ROWS = "defaults.per_device_train_batch_size=2"


def trained(example: str, folder: Path, *changes: str) -> RunResult:
    """Returns what came of an example's config, whose run is the folder `run`."""
    result = mlora.train(
        load_config(EXAMPLES / f"{example}.yaml", [f"output_dir={folder / 'run'}", *changes])
    )
    assert result.status == "finished", result
    assert {one.state for one in result.adapters.values()} == {"finished"}, result
    return result


def metrics(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "run" / "metrics.jsonl")


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "adapters" / name / "adapter_model.safetensors")


def test_several_kinds_of_adapters(tmp_path: Path) -> None:
    trained("adapter_kinds", tmp_path, "defaults.max_steps=2", TWO_ROWS)
    parts = {"dora": "lora_magnitude_vector", "with-bias": "lora_B.bias", "plain": "lora_B.weight"}
    for name, part in parts.items():
        assert any(key.endswith(part) for key in weights(tmp_path, name)), name


def test_callbacks_end_the_adapter_that_is_good_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(callbacks.StopAtLoss, "__init__", lambda self, enough: setattr(self, "enough", 20.0))
    monkeypatch.setattr(sys, "argv", ["callbacks.py", "--output", str(tmp_path / "run"), "--steps", "2"])
    callbacks.main()
    told = capsys.readouterr().out.splitlines()
    assert "reverse: finished at step 1 stopped by StopAtLoss" in told
    assert [f"{name}: finished at step 2" in told for name in ("sums", "sort", "dates")] == [True] * 3
    own = [line for line in metrics(tmp_path) if line["adapter"] == "reverse" and "eval_loss" in line]
    losses = {line["step"]: line["eval_loss"] for line in own}
    assert f"reverse: epoch 0.00, held-out loss {losses[0]:.4f}" in told
    assert f"reverse: epoch 0.02, held-out loss {losses[1]:.4f}" in told


def test_a_classifier_learns_beside_causal_adapters(tmp_path: Path) -> None:
    trained("classification", tmp_path, "defaults.max_steps=4", "adapters.kinds.eval_steps=2", TWO_ROWS)
    found = [line for line in metrics(tmp_path) if "eval_accuracy" in line]
    assert [line["step"] for line in found] == [0, 2, 4]
    assert found[-1]["eval_loss"] < found[0]["eval_loss"]


def test_adapters_on_experts_equal_those_of_peft(tmp_path: Path) -> None:
    experts.save_mixture(tmp_path / "base")
    losses = experts.train(tmp_path / "base", tmp_path / "run", steps=6)
    for name, found in losses.items():
        assert len(found) == 6
        assert found[-1] < found[0], name
    assert experts.largest_difference(tmp_path / "base", tmp_path / "run", "sort dcba = ") < 1e-4


@pytest.mark.filterwarnings("ignore")
def test_initialisations(tmp_path: Path) -> None:
    data = read_yaml(EXAMPLES / "initialisations.yaml")
    data["defaults"] |= {"max_steps": 2, "logging_steps": 1, "init_samples": 32, "warmup_steps": 1}
    result = mlora.train(resolve_config(data | {"output_dir": str(tmp_path / "run")}, folder=EXAMPLES))
    assert result.status == "finished"
    for name, adapter in result.adapters.items():
        assert adapter.state == "finished", (name, adapter.message)
    base = AutoModelForCausalLM.from_pretrained(BASE)
    peft = PeftModel.from_pretrained(base, tmp_path / "run" / "adapters" / "pissa")
    assert peft.peft_config["default"].r == 16


def test_a_base_on_disk_trains_as_in_memory(tmp_path: Path) -> None:
    assert load_config(EXAMPLES / "offload.yaml").offload.base == "disk"
    changes = ["defaults.max_steps=3", TWO_ROWS, "base_gemm=aten"]
    names = trained("offload", tmp_path / "disk", *changes).adapters
    trained("offload", tmp_path / "kept", *changes, "offload={base: device}")
    on_disk, kept = (
        {
            f"{name} {key}": value.numpy().tobytes()
            for name in names
            for key, value in weights(tmp_path / where, name).items()
        }
        for where in ("disk", "kept")
    )
    assert len(kept) > 20
    assert on_disk == kept


@pytest.mark.peers
def test_several_optimizers(tmp_path: Path) -> None:
    result = trained("optimizers", tmp_path, "defaults.max_steps=2", "device=cpu")
    assert set(result.adapters) == {"plain", "eight", "plus", "factored", "lion", "frozen-a"}


def test_a_sweep(tmp_path: Path) -> None:
    short = ["sweep.trials=3", "sweep.places=2", "sweep.pruner=none"]
    short += ["defaults.max_steps=2", "defaults.eval_steps=2", TWO_ROWS]
    result = mlora.train(load_config(EXAMPLES / "sweep.yaml", [f"output_dir={tmp_path / 'run'}", *short]))
    assert result.status == "finished", result
    assert len(result.adapters) == 3
    judged = {line["adapter"] for line in metrics(tmp_path) if "eval_loss" in line and line["step"] == 2}
    assert judged == set(result.adapters)


def test_five_objectives_in_one_run(tmp_path: Path) -> None:
    trained("preferences", tmp_path, "defaults.max_steps=2", "defaults.eval_steps=2", TWO_ROWS)
    found = metrics(tmp_path)
    steps = {line["adapter"]: line for line in found if line.get("step") == 2 and "loss" in line}
    assert set(steps) == {"dpo", "ipo", "orpo", "kto", "plain"}
    assert "rewards/margins" in steps["dpo"]
    assert "log_odds_ratio" in steps["orpo"]
    assert "kl" in steps["kto"]
    assert "rewards/margins" not in steps["plain"]


@pytest.mark.peers
def test_a_base_of_four_bits(tmp_path: Path) -> None:
    changes = ["defaults.max_steps=4", "defaults.warmup_steps=1"]
    changes += ["defaults.eval_steps=null", "defaults.per_device_train_batch_size=8"]
    changes += [f"adapters.{name}.eval_dataset=null" for name in ("sums", "sort", "sums-loftq")]
    quantization = load_config(EXAMPLES / "quantized.yaml").quantization
    assert quantization is not None
    assert quantization.method == "bnb-nf4"
    trained("quantized", tmp_path, *changes)
    losses = [line["loss"] for line in metrics(tmp_path) if line["adapter"] == "sort"]
    assert len(losses) == 4
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]


@pytest.mark.peers
def test_loftq_begins_nearer_to_the_original_model() -> None:
    """On the task of one of its adapters; `docs/adapters.md` has the numbers of other ranks."""
    lines = read_lines("sums-held-out")[:50]
    batch = AutoTokenizer.from_pretrained(BASE, padding_side="right")(
        [line["prompt"] + line["completion"] for line in lines], return_tensors="pt", padding=True
    ).to(torch.get_default_device())
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    model = AutoModelForCausalLM.from_pretrained(BASE, quantization_config=four_bits, dtype=torch.float32)
    fields: dict[str, Any] = {"r": 16, "lora_alpha": 16, "target_modules": "all-linear"}
    loftq = LoraConfig(**fields, init_lora_weights="loftq", loftq_config=LoftQConfig())
    mx.convert_model(model, {"zero": LoraConfig(**fields), "loftq": loftq}).train()
    mx.initialise_from_weights(model, "loftq", BASE)
    counts = batch["attention_mask"].bool()
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)(**batch).logits[counts]
        found = {
            name: model(**batch, adapter_names=[name] * len(lines)).logits[counts]
            for name in ("zero", "loftq")
        }
    error = {name: ((logits - wanted).norm() / wanted.norm()).item() for name, logits in found.items()}
    assert error == pytest.approx({"zero": 0.0438, "loftq": 0.0344}, rel=0.02)


@pytest.mark.parametrize("schedule", ["lorapp", "1f1b", "gpipe"])
def test_a_pipeline_of_ones_own_modules_trains_as_one_module(schedule: str) -> None:
    torch.manual_seed(1)
    stages = own_pipeline.make_stages(4)
    whole = nn.Sequential(*copy.deepcopy(stages))
    torch.manual_seed(2)
    losses = own_pipeline.train(stages, 30, 3, schedule)
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for step in range(30):
        reports = []
        for _ in range(3):
            x = torch.randn(64, 4)
            loss, report = own_pipeline.loss_fn(whole(x), x.sum(dim=1, keepdim=True).sin())
            loss.backward()
            reports.append(report)
        optimizer.step()
        optimizer.zero_grad()
        assert losses[step] == pytest.approx(sum(reports) / 3, rel=1e-5)
    assert losses[-1] < losses[0]


def test_the_script_of_a_pipeline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [own_pipeline.__file__, "--steps", "5"])
    runpy.run_path(own_pipeline.__file__, run_name="__main__")
    assert capsys.readouterr().out.startswith("loss ")
