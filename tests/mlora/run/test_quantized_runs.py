"""Runs over quantised base models: stages, resume, quantised checkpoints, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import mlora
import pytest
import torch
from command_line import Run
from mlora.config.config_file import resolve_config
from mlora.config.sections import QuantizationConfig
from mlora.engine.engine import Engine
from mlora.errors import RunError
from mlora.model import quantization
from mlora.model.quantization import transformers_config
from mlora.optim.optim_config import OptimConfig
from mlora.run.handoff.export import export_adapter
from mlora.run.handoff.merge import merge_adapter
from mlora.run.validation import validate
from transformers import AutoModelForCausalLM

from tests.mlora.seam_runs import train_and_resume
from tests.mlora.tiny_run import losses, run_data, save_base, write_run

pytestmark = pytest.mark.peers
OTHERS = [("bnb-nf4", 1), ("torchao-int8", 1), ("bnb-int8", 2)]
NF4 = {"method": "bnb-nf4", "double_quant": True}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("wide"), hidden=64, intermediate_size=128)


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same base as Transformers saves it in other formats."""
    found = {}
    for method in ("bnb-nf4", "bnb-int8", "torchao-int8"):
        config = transformers_config(QuantizationConfig(method=method), torch.float32)
        model = AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.float32)
        found[method] = tmp_path_factory.mktemp(method)
        shutil.copytree(base, found[method], dirs_exist_ok=True)
        (found[method] / "model.safetensors").unlink()
        model.save_pretrained(found[method])
    return found


def trained(data: dict[str, Any], folder: Path) -> list[float]:
    assert mlora.train(resolve_config(data, folder=folder)).status == "finished"
    return [loss for name in ("first", "second") for loss in losses(Path(data["output_dir"]), name)]


def test_a_run_resumes_with_the_same_bits_and_two_stages_are_one(base: Path, tmp_path: Path) -> None:
    found = []
    for stages in (1, 2):
        folder = tmp_path / str(stages)
        folder.mkdir()
        data = run_data(base, folder, pipeline={"stages": stages}, quantization=NF4)
        run = train_and_resume(data, folder)
        found.append([loss for name in ("first", "second") for loss in losses(run, name)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize(
    ("method", "stages"),
    [
        ("bnb-nf4", 2),
        ("torchao-int8", 2),
        ("bnb-int8", 1),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in OTHERS),
    ],
)
def test_a_checkpoint_that_is_quantised_already(
    base: Path, saved: dict[str, Path], tmp_path: Path, method: str, stages: int
) -> None:
    """The same losses as when the run quantises."""
    short = {"max_steps": 2, "learning_rate": 5e-3, "save_steps": None}
    data = run_data(saved[method], tmp_path, pipeline={"stages": stages}, defaults=short)
    del data["adapters"][1]["max_steps"]
    now = data | {"base_model": str(base), "quantization": {"method": method}}
    found = [
        trained(one | {"output_dir": str(tmp_path / f"run{i}")}, tmp_path)
        for i, one in enumerate((data, now))
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("limit", [None, pytest.param("4GiB", marks=pytest.mark.nightly)])
def test_checkpointing_a_memory_limit_and_generate(
    run: Run, base: Path, tmp_path: Path, limit: str | None
) -> None:
    more = {"gradient_checkpointing": True, "quantization": NF4, "scheduler": {"memory_limit": limit}}
    data = run_data(base, tmp_path, **more)
    data["defaults"]["max_steps"] = 2
    del data["adapters"][1], data["adapters"][0]["eval_dataset"], data["adapters"][0]["eval_steps"]
    path = write_run(tmp_path, data)
    told = run("validate", path).stdout
    assert re.search(r"^base model: quantized, bnb-nf4: \d+ KiB$", told, re.MULTILINE), told
    assert run("train", path).exit_code == 0
    done = run("generate", tmp_path / "run", "-p", "7", "--max-new-tokens", "2")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("[first] 7")


def test_bytes_of_each_stage(base: Path) -> None:
    """Each stage holds its own layers, in 4 bits."""
    with Engine(base, stages=2, quantization=QuantizationConfig(**NF4)) as engine:
        places = engine.base_bytes()
    linear = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128
    for place in places:
        outside = 4 * 260 * 64
        assert 0.5 * linear < place.memory - outside < 0.75 * linear + 7 * 1100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quantization": {"method": "bnb-nf5"}},
            "quantization.method: 'bnb-nf5' is unknown; did you",
        ),
        (
            {"quantization": {"method": "gptq"}},
            "quantization.method: must be one of bnb-nf4, bnb-fp4, bnb-int8, torchao-",
        ),
        (
            {"quantization": {"method": "bnb-int8", "double_quant": True}},
            "quantization.double_quant: is not an option of bnb-int8; remove it",
        ),
        (
            {"quantization": {"method": "bnb-nf4", "group_size": 64}},
            "quantization.group_size: is not an option of bnb-nf4; remove it",
        ),
        (
            {"quantization": {"method": "bnb-nf4", "doublequant": True}},
            "quantization.doublequant: unknown key",
        ),
        (
            {"quantization": NF4, "pack_base": True},
            "pack_base: needs plain weights, but the base model is quan",
        ),
        (
            {"quantization": NF4, "offload": {"base": "disk"}},
            "offload: does not serve a quantized base model yet; remove offload, or quantization",
        ),
    ],
)
def test_configs_that_are_refused(base: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError) as caught:
        resolve_config(run_data(base, tmp_path) | changes, folder=tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pack_base": True}, "pack_base: needs plain weights, but the base model is quantized; remove it"),
        ({"offload": {"activations": "swap"}}, "offload: does not serve a quantized base model yet"),
        (
            {"quantization": NF4},
            "is quantized already (bitsandbytes); remove quantization, or name the origin",
        ),
    ],
)
def test_what_a_quantised_checkpoint_does_not_serve(
    saved: dict[str, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RunError) as caught:
        validate(resolve_config(run_data(saved["bnb-int8"], tmp_path) | changes, folder=tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_missing_package_is_one_line(
    base: Path, saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    pipeline = {"stages": stages}
    data = run_data(base, tmp_path, quantization={"method": "torchao-int8"}, pipeline=pipeline)
    with pytest.raises(
        RunError, match=r"^quantization: its method needs the package torchao, .*: pip install"
    ):
        mlora.train(resolve_config(data, folder=tmp_path))
    data = run_data(saved["bnb-nf4"], tmp_path, pipeline=pipeline)
    with pytest.raises(
        RunError, match=r"^base_model: its weights need the package bitsandbytes, which is not"
    ):
        mlora.train(resolve_config(data, folder=tmp_path))


def test_weights_that_do_not_fit_their_config(saved: dict[str, Path], tmp_path: Path) -> None:
    """A checkpoint whose config says that it is quantised, and whose weights say otherwise."""
    wrong = tmp_path / "wrong"
    shutil.copytree(saved["bnb-nf4"], wrong)
    config = json.loads((wrong / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (wrong / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match=r"^base_model: ") as caught:
        validate(resolve_config(run_data(wrong, tmp_path), folder=tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("method", ["torchao-int8", "torchao-int4"])
def test_a_group_size_that_does_not_divide_a_width(
    base: Path, tmp_path: Path, method: str, stages: int
) -> None:
    """The head, which is not quantised, does not count."""
    how = {"method": method, "group_size": 48}
    data = run_data(base, tmp_path, quantization=how, pipeline={"stages": stages})
    with pytest.raises(
        RunError,
        match=r"^quantization\.group_size: 48 does not divide 64, the width of model\.layers\.0\.self_attn"
        r"\.q_proj; choose a divisor of the widths of all linear layers$",
    ):
        mlora.train(resolve_config(data, folder=tmp_path))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("method", "stored"),
    [("bnb-nf4", False), ("bnb-nf4", True), ("bnb-int8", False), ("torchao-int8", False)],
)
def test_merging_dequantises_what_the_adapter_was_trained_over(
    base: Path, saved: dict[str, Path], tmp_path: Path, method: str, stored: bool
) -> None:
    """The logits of the adapter in an engine; bitsandbytes' own layers round activations."""
    data = run_data(saved[method] if stored else base, tmp_path)
    more = {} if stored else {"quantization": {"method": method}}
    trained(data | more, tmp_path)
    done = merge_adapter(tmp_path / "run", "first", tmp_path / "merged")
    assert done.notes == ["14 quantized layers were dequantized; the merged model is not quantized"]
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.tensor([[5, 9, 77, 130, 8, 251]])
    with Engine(str(data["base_model"]), **more) as engine, torch.no_grad():
        optim = OptimConfig(lr_scheduler_type="constant")
        engine.load("first", tmp_path / "run" / "adapters" / "first", optim)
        expected = engine.model.eval()(input_ids=ids, adapter_names=["first"]).logits
        torch.testing.assert_close(merged(ids).logits, expected, atol=1e-5, rtol=0)
    served = export_adapter(tmp_path / "run", "first", portable=True).served
    assert len(served) == 2 + (not stored)
    assert stored or f"quantized with {method}: quantize it alike, or merge" in served[-1]
