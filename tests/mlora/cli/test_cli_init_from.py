"""`init_from`, as the command line tells of it."""

import json
import shutil
from pathlib import Path

from command_line import Run, only_line
from safetensors.torch import load_file, save_file
from tiny_run import run_data, save_base, write_run


def test_adapter_folder_of_another_base(run: Run, trained: Path, tmp_path: Path) -> None:
    other = save_base(tmp_path / "other", hidden=64)
    data = run_data(other, tmp_path)
    data["adapters"][0] |= {"lora": None, "init_from": str(trained / "adapters" / "first")}
    result = run("train", write_run(tmp_path, data))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"warning: first: init_from: {trained}/adapters/first was trained on ")
    assert "use an adapter of this base model" in result.stderr.splitlines()[1]
    line = only_line(run("generate", trained / "adapters" / "first", "-p", "x", "--base-model", other))
    assert "use an adapter of this base model" in line


def test_a_folder_that_names_another_base_is_warned_of(
    run: Run, trained: Path, tiny_base: Path, tmp_path: Path
) -> None:
    data = run_data(tiny_base, tmp_path)
    folder = shutil.copytree(trained / "adapters" / "first", tmp_path / "mine")
    data["adapters"][0] |= {"lora": None, "init_from": str(folder)}
    path = write_run(tmp_path, data)
    assert run("validate", path).stderr == ""
    saved = json.loads((folder / "adapter_config.json").read_text())
    for named, warned in (
        ("someone/llama", True),
        (f"elsewhere/{tiny_base.name}", False),
        (None, False),
        ("", False),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(saved | {"base_model_name_or_path": named}))
        result = run("validate", path)
        assert result.exit_code == 0
        assert result.stderr == (
            f"warning: first: init_from: {folder} was trained on someone/llama, "
            f"but this run's base_model is {tiny_base}\n"
            if warned
            else ""
        )


def test_weights_that_are_no_numbers_are_refused(
    run: Run, trained: Path, tiny_base: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(trained / "adapters" / "first", tmp_path / "mine")
    weights = load_file(folder / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    weights[key][0, 0] = float("nan")
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0] |= {"lora": None, "init_from": str(folder)}
    expected = f"folder: {folder}: the tensor {key} contains NaN or infinity"
    result = run("validate", write_run(tmp_path, data))
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0] == f"error: first: refused: {expected}"
    assert only_line(run("generate", folder, "-p", "x")) == f"error: {expected}"


def test_lora_beside_init_from_must_agree(run: Run, trained: Path, tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0] |= {"init_from": str(trained / "adapters" / "first")}
    path = write_run(tmp_path, data)
    result = run("validate", path)  # all-linear, as the folder was made, whatever names it lists
    assert result.exit_code == 0, result.stderr
    result = run("validate", path, "--set", "adapters.first.lora.r=5")
    assert result.stderr.startswith("error: first: refused: lora.r: is 5, but the adapter in init_from has 4")
    result = run("validate", path, "--set", "adapters.first.lora.target_modules=[q_proj]")
    assert result.stderr.startswith("error: first: refused: lora.target_modules: is ['q_proj'], but the")
    assert "was trained on" not in result.stderr
    saved = json.loads((trained / "adapters" / "first" / "adapter_config.json").read_text())
    other = shutil.copytree(trained / "adapters" / "first", tmp_path / "other")
    (other / "adapter_config.json").write_text(
        json.dumps(saved | {"base_model_name_or_path": "someone/llama", "target_modules": ["x" * 500]})
    )
    data["adapters"][0] |= {"init_from": str(other)}
    path = write_run(tmp_path, data)
    result = run("validate", path, "--set", "adapters.first.lora.target_modules=[q_proj]")
    assert f"({other} was trained on someone/llama); write the same value" in result.stderr
    assert len(result.stderr) < 500


def test_folder_of_an_older_peft_agrees_with_the_defaults(
    run: Run, trained: Path, tiny_base: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(trained / "adapters" / "first", tmp_path / "older")
    saved = json.loads((folder / "adapter_config.json").read_text())
    del saved["use_rslora"]
    (folder / "adapter_config.json").write_text(json.dumps(saved))
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0] |= {"init_from": str(folder), "lora": {"r": 4, "use_rslora": False}}
    result = run("validate", write_run(tmp_path, data))
    assert result.exit_code == 0, result.stderr


def test_how_an_adapter_began_is_past(run: Run, trained: Path, tiny_base: Path, tmp_path: Path) -> None:
    """A folder whose A and B began orthogonal is trained on; one for which PEFT changed the base is not."""
    folder = shutil.copytree(trained / "adapters" / "first", tmp_path / "mine")
    saved = json.loads((folder / "adapter_config.json").read_text())
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0] |= {"lora": None, "init_from": str(folder)}
    path = write_run(tmp_path, data)
    (folder / "adapter_config.json").write_text(json.dumps(saved | {"init_lora_weights": "orthogonal"}))
    assert run("validate", path).exit_code == 0
    assert run("train", path).exit_code == 0
    (folder / "adapter_config.json").write_text(json.dumps(saved | {"init_lora_weights": "pissa"}))
    for command in ("validate", "train"):
        result = run(command, path, "--set", f"output_dir={tmp_path}/again")
        assert result.exit_code == 1
        assert "init_lora_weights='pissa' is not supported for an adapter of PEFT" in result.stderr
        assert "Traceback" not in result.stderr
