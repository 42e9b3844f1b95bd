"""Base models that cannot be loaded, as the command line tells of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import Run, only_line
from safetensors.torch import load_file, save_file
from tiny_run import run_data, write_run


def test_base_models_that_cannot_be_loaded(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    (tmp_path / "empty").mkdir()
    assert "has no config.json; give a model's folder" in only_line(
        run("train", path, "--set", f"base_model={tmp_path}/empty")
    )
    shutil.copytree(tiny_base, tmp_path / "weightless")
    (tmp_path / "weightless" / "model.safetensors").unlink()
    line = only_line(run("train", path, "--set", f"base_model={tmp_path}/weightless"))
    assert line.startswith(f"error: base_model: cannot load {tmp_path}/weightless: ")
    broken = tmp_path / "weightless" / "model.safetensors"
    weights = load_file(tiny_base / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, broken, metadata={"format": "pt"})
    line = only_line(run("train", path, "--set", f"base_model={tmp_path}/weightless"))
    assert line.endswith("is missing 1 weights, for example model.layers.1.mlp.up_proj.weight")
    broken.write_bytes((tiny_base / "model.safetensors").read_bytes()[:5000])
    assert "base_model: cannot load" in only_line(
        run("train", path, "--set", f"base_model={tmp_path}/weightless")
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": "wide"}, "Field 'hidden_size' expected int, got str (value: 'wide')"),
        ({"vocab_size": 300}, "mismatched_sizes"),
        ({"num_attention_heads": 5}, "is not a multiple of the number of attention heads (5)"),
    ],
)
def test_base_model_whose_config_is_wrong(
    run: Run, tiny_base: Path, tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    shutil.copytree(tiny_base, tmp_path / "odd")
    config = tmp_path / "odd" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    path = write_run(tmp_path, run_data(tmp_path / "odd", tmp_path))
    line = only_line(run("train", path))
    assert line.startswith(f"error: base_model: cannot load {tmp_path}/odd: ")
    assert expected in line


@pytest.mark.parametrize("command", ["validate", "train"])
@pytest.mark.parametrize(
    "method",
    [
        {"quant_method": "compressed-tensors"},
        {"quant_method": "fp8"},  # Transformers loads it itself, without another package
        {"quant_method": "unheard-of"},
        {"bits": 4},
    ],
)
def test_quantized_base(run: Run, tiny_base: Path, tmp_path: Path, method: dict, command: str) -> None:
    """The same line with and without the package that loads such weights: nothing is loaded."""
    shutil.copytree(tiny_base, tmp_path / "few-bits")
    config = tmp_path / "few-bits" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": method}))
    path = write_run(tmp_path, run_data(tmp_path / "few-bits", tmp_path))
    named = method.get("quant_method", "its config.json has a quantization_config without quant_method")
    package = f"; Transformers reads it with {named}" if named == "compressed-tensors" else ""
    assert only_line(run(command, path)) == (
        f"error: base_model: {tmp_path}/few-bits is quantized ({named}), and only checkpoints of "
        f"bitsandbytes, torchao, gptq and awq are served{package}; use the original model, and "
        "`quantization: {method: bnb-nf4}` to save memory"
    )


@pytest.mark.peers
@pytest.mark.parametrize(
    "said", [{"quant_method": "torchao", "quant_type": "int7"}, {"quant_method": "bitsandbytes"}]
)
def test_quantization_that_cannot_be_read(run: Run, tiny_base: Path, tmp_path: Path, said: dict) -> None:
    shutil.copytree(tiny_base, tmp_path / "few-bits")
    config = tmp_path / "few-bits" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": said}))
    path = write_run(tmp_path, run_data(tmp_path / "few-bits", tmp_path))
    assert only_line(run("validate", path)).startswith(f"error: base_model: {tmp_path}/few-bits: its quantiz")


def test_config_of_another_shape_than_transformers_expects(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_base, tmp_path / "odd")
    config = tmp_path / "odd" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": "few bits"}))
    path = write_run(tmp_path, run_data(tmp_path / "odd", tmp_path))
    assert only_line(run("validate", path)).startswith(f"error: base_model: cannot load {tmp_path}/odd: ")
