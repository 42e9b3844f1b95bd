"""Runs with adapters on experts: interrupted ones, over two stages, under a limit, and their checks."""

import json
import re
from pathlib import Path
from typing import Any

import mlora
import pytest
from mlora.config.config_file import resolve_config
from mlora.config.lora_fields import LoraFields
from mlora.data.record import Sample
from mlora.engine.engine import Engine
from mlora.errors import RunError
from mlora.model.base_info import router_loss_fault
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from safetensors.torch import load_file

from tests.mixtures import mixture
from tests.mlora.command_line import invoke
from tests.mlora.limited_runs import Watching
from tests.mlora.seam_runs import data_of, train_and_resume
from tests.mlora.stage_runs import assert_alike
from tests.mlora.tiny_run import save_tokenizer, write_run
from tests.tolerances import STEADY_EPSILON

LORA: dict[str, Any] = {
    "r": 2,
    "target_modules": ["q_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "gate.weight"],
}


def save_mixture(folder: Path) -> Path:
    mixture("qwen3_moe", vocab_size=260, eos_token_id=0, bos_token_id=None).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def run_of(folder: Path, stages: int) -> dict[str, Any]:
    """Experts, router and attention; and everything that PEFT targets."""
    folder.mkdir()
    base = folder.parent / "base"
    data = data_of(base if base.exists() else save_mixture(base), folder, stages, lora=LORA)
    data["adapters"][1] |= {"lora": {"r": 3, "target_modules": "all-linear"}, "max_steps": 5}
    data["adapters"][0]["gradient_accumulation_steps"] = 2
    data["defaults"] |= {"adam_epsilon": STEADY_EPSILON, "max_steps": 4}
    return data | {"gradient_checkpointing": stages == 2}


def test_two_stages_resume_bit_for_bit_and_equal_one(tmp_path: Path) -> None:
    two = train_and_resume(run_of(tmp_path / "2", 2), tmp_path / "2")
    data = run_of(tmp_path / "1", 1)
    assert mlora.train(resolve_config(data, folder=tmp_path / "1")).status == "finished"
    assert_alike(two, tmp_path / "1" / "run")


@pytest.mark.nightly
def test_one_stage_resumes_bit_for_bit(tmp_path: Path) -> None:
    train_and_resume(run_of(tmp_path / "1", 1), tmp_path / "1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_dropout": 0.1}, "is a parameter, for which PEFT serves no lora_dropout"),
        ({"target_parameters": ["experts.up"]}, r"\['experts.up'\] match no parameter"),
        ({"target_parameters": "experts"}, "must be a list of names of parameters, got 'experts'"),
    ],
)
def test_validate_refuses_in_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    data = run_of(tmp_path / "1", 1)
    data["adapters"][0]["lora"] = LORA | changes
    result = invoke("validate", write_run(tmp_path / "1", data))
    assert result.exit_code == 1
    assert re.search(message, " ".join((result.stdout + result.stderr).split())), (
        result.stdout + result.stderr
    )


def test_validate_warns_of_names_and_ranks_that_do_nothing(tmp_path: Path) -> None:
    data = run_of(tmp_path / "1", 1)
    names = [*LORA["target_parameters"], "experts.up_proj"]
    data["adapters"][0]["lora"] = LORA | {"r": 20, "target_parameters": names}
    result = invoke("validate", write_run(tmp_path / "1", data))
    told = " ".join((result.stdout + result.stderr).split())
    assert result.exit_code == 0, told
    assert "'experts.up_proj' matches nothing in the model; did you mean 'experts.gate_up_proj'?" in told
    assert re.search(r"lora.r: 20 is too high; model.layers.0.mlp.\w+ can use \d+ at most", told)


def test_parameters_alone_are_targets(tmp_path: Path) -> None:
    data = run_of(tmp_path / "1", 1)
    data["adapters"], data["defaults"]["max_steps"] = data["adapters"][:1], 1
    data["adapters"][0]["lora"] = LORA | {"target_modules": []}
    name = data["adapters"][0]["name"]
    assert mlora.train(resolve_config(data, folder=tmp_path / "1")).status == "finished"
    saved = load_file(tmp_path / "1" / "run" / "adapters" / name / "adapter_model.safetensors")
    assert saved
    assert all(".mlp." in key for key in saved)


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules"])
def test_an_empty_list_alone_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}\n.*must not be empty"):
        LoraFields.model_validate({field: []})


@pytest.mark.parametrize("stages", [1, 2])
def test_targets_that_match_nothing_are_told_of_once(tmp_path: Path, stages: int) -> None:
    """Not those that PEFT translates, nor those of layers on the other stage."""
    mixture("mixtral", vocab_size=260, eos_token_id=0, bos_token_id=None).save_pretrained(tmp_path / "base")
    save_tokenizer(tmp_path / "base")
    names = ["q_proj", "w1", "w2", "w3", "model.layers.1.self_attn.k_proj", "v_porj"]
    data = data_of(tmp_path / "base", tmp_path, stages, lora={"r": 2, "target_modules": names})
    data["adapters"], data["defaults"]["max_steps"] = data["adapters"][:1], 1
    told = Watching()
    assert mlora.train(resolve_config(data, folder=tmp_path), reporter=told).status == "finished"
    name = data["adapters"][0]["name"]
    assert [line for line in told.lines if "match" in line] == [
        f"{name}: lora.target_modules: 'v_porj' matches nothing in the model; did you mean 'v_proj'?"
    ]


def test_a_base_that_asks_for_its_routers_loss_is_refused(tmp_path: Path) -> None:
    """Transformers adds `router_aux_loss_coef` times that loss to cross-entropy; with 0 it adds nothing."""
    data = run_of(tmp_path / "1", 1)
    base = tmp_path / "base" / "config.json"
    plain = json.loads(base.read_text())
    said = "base_model: its config has output_router_logits: true, .* is not served; set it to false"
    base.write_text(json.dumps(plain | {"output_router_logits": True, "router_aux_loss_coef": 0.5}))
    with pytest.raises(RunError, match=f"^{said}"):
        mlora.train(resolve_config(data, folder=tmp_path / "1"))
    model = mixture("mixtral")
    model.config.output_router_logits = True
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    with Engine(model) as engine:
        engine.create_adapter("a", lora, OptimConfig(total_steps=1))
        batch = {"a": [Sample((1, 2, 3), (1, 2, 3))]}
        with pytest.raises(ValueError, match=f"^{said}"):
            engine.forward_backward(batch)
    model.config.router_aux_loss_coef = 0.0
    assert router_loss_fault(model.config) is None
