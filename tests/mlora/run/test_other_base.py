"""Another base model than the one that a run began with: a resume refuses it, handing over warns of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.config.config_file import resolve_config
from mlora.errors import RunError
from mlora.model.base_info import DIGEST, BaseInfo
from mlora.run.run import resume, train
from mlora.store.checkpoint import list_checkpoints
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.mlora.command_line import invoke
from tests.mlora.limited_runs import Watching, interrupt
from tests.mlora.tiny_run import lines, run_data, save_base, weights


def _another_weight(base: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += 1.0
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})


def _another_config(base: Path) -> None:
    text = (base / "config.json").read_text()
    (base / "config.json").write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))


def _another_tokenizer(base: Path) -> None:
    text = (base / "tokenizer.json").read_text()
    (base / "tokenizer.json").write_text(text.replace('"<end>"', '"<stop>"'))


def _another_end(base: Path) -> None:
    (base / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')


def interrupted(base: Path, folder: Path) -> Path:
    data = run_data(base, folder)
    result = train(resolve_config(data, folder=folder), reporter=Watching({8: interrupt}))
    assert result.status == "interrupted"
    return folder / "run"


@pytest.mark.parametrize("change", [_another_weight, _another_config, _another_tokenizer, _another_end])
def test_a_resume_refuses_another_base(
    tiny_base: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    base = shutil.copytree(tiny_base, tmp_path / "base")
    run = interrupted(base, tmp_path)
    change(base)
    with pytest.raises(
        RunError, match=rf"^base_model: {base} is not the model that the checkpoint was"
    ) as error:
        resume(run)
    assert "\n" not in str(error.value)


def test_a_base_that_moved_and_was_named_anew_is_the_same(tiny_base: Path, tmp_path: Path) -> None:
    """Ends with the bits of a run whose base stayed in its place."""
    base = shutil.copytree(tiny_base, tmp_path / "base")
    assert train(resolve_config(run_data(base, tmp_path, output_dir="whole"), folder=tmp_path)).exit_code == 0
    run = interrupted(base, tmp_path)
    base.rename(tmp_path / "moved")
    text = (tmp_path / "moved" / "config.json").read_text()
    (tmp_path / "moved" / "config.json").write_text(text.replace("{", '{"_name_or_path": "elsewhere",', 1))
    sampling = tmp_path / "moved" / "generation_config.json"
    asks = {"temperature": 0.5, "top_k": 3, "eos_token_id": [0, 0]}  # the end token of before
    sampling.write_text(json.dumps(json.loads(sampling.read_bytes()) | asks))
    said = Watching()
    assert resume(run, settings=[f"base_model={tmp_path / 'moved'}"], reporter=said).exit_code == 0
    assert any(line.startswith(f"{run}/config.yaml: base_model is ") for line in said.lines)
    assert lines(run) == lines(tmp_path / "whole")
    assert weights(run) == weights(tmp_path / "whole")


def test_a_checkpoint_of_an_earlier_version_has_no_digest(tiny_base: Path, tmp_path: Path) -> None:
    """It goes on over the base of its config, whatever is there, and over no other."""
    base = shutil.copytree(tiny_base, tmp_path / "base")
    run = interrupted(base, tmp_path)
    new = ("base", "metrics_crc32", "samples_crc32")
    for path in list_checkpoints(run / "checkpoints"):
        content = torch.load(path, weights_only=True)
        for task in content["tasks"].values():
            del task["saved"]
        torch.save({key: value for key, value in content.items() if key not in new}, path)
    shutil.copytree(base, tmp_path / "copy")
    with pytest.raises(RunError, match=r"copy is not the model that the checkpoint was trained over"):
        resume(run, settings=[f"base_model={tmp_path / 'copy'}"])
    _another_weight(base)
    assert resume(run).exit_code == 0


def test_handing_over_warns_of_another_base(tiny_base: Path, tmp_path: Path) -> None:
    base = shutil.copytree(tiny_base, tmp_path / "base")
    data: dict[str, Any] = run_data(base, tmp_path)
    data["adapters"][0]["eval_dataset"] = "two"
    assert train(resolve_config(data, folder=tmp_path)).exit_code == 0
    run = tmp_path / "run"
    adapter = run / "adapters" / "first"
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", DIGEST: BaseInfo(str(base)).digest}
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    calls = {
        "export": ["export", run, "first", "--output", tmp_path / "OUT"],
        "portable": ["export", run, "first", "--portable", "--output", tmp_path / "OUT"],
        "of a checkpoint": ["export", run, "first", "--checkpoint", "12", "--output", tmp_path / "OUT"],
        "merge": ["merge", run, "first", "--output", tmp_path / "OUT"],
        "evaluate": ["evaluate", run, "first"],
        "generate": ["generate", run, "--adapter", "first", "--prompt", "a", "--max-new-tokens", "1"],
        "generate of a folder": ["generate", adapter, "--prompt", "a", "--max-new-tokens", "1"],
    }
    for changed in (False, True):
        if changed:
            _another_weight(base)
        for name, call in calls.items():
            shutil.rmtree(tmp_path / "OUT", ignore_errors=True)
            done = invoke(*call)
            assert done.exit_code == 0, (name, done.stderr)
            told = f"was trained over another model than {base}" in done.stdout + done.stderr
            assert told == changed, (name, done.stdout, done.stderr)


def test_a_digest_takes_as_long_for_a_large_base(tmp_path: Path) -> None:
    """Sparse files of 2 TiB; reading them whole would take half an hour."""
    base = save_base(tmp_path / "base")
    (base / "model.safetensors").unlink()
    for name in ("model-1.safetensors", "model-2.safetensors"):
        with open(base / name, "wb") as file:
            os.truncate(file.fileno(), 1 << 40)
    before = BaseInfo(str(base)).digest
    with open(base / "model-2.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert BaseInfo(str(base)).digest != before


def test_commits_of_the_hub(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another commit is another model; a folder of its files cannot be compared, and is warned of."""
    monkeypatch.setattr(BaseInfo, "digest", "commit:abc")
    run = interrupted(tiny_base, tmp_path)
    monkeypatch.setattr(BaseInfo, "digest", "commit:def")
    with pytest.raises(RunError, match="another commit of it now; download abc into a folder") as error:
        resume(run)
    assert "\n" not in str(error.value)
    monkeypatch.setattr(BaseInfo, "digest", "files:1")
    told = Watching()
    assert resume(run, reporter=told).status == "finished"
    assert any("cannot be compared with the model of the checkpoint" in line for line in told.lines)
