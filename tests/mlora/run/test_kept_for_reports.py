"""What a run keeps for its report: answers to held-out prompts, and what it trained with."""

import json
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.config.config_file import resolve_config
from mlora.run.environment import note_start
from mlora.run.evaluation import SAMPLE_LETTERS, SAMPLES, _sample
from mlora.run.run import resume, train
from mlora.store.run_folder import RunFolder
from mlora.store.samples import read_samples
from test_resume import Crashing
from tiny_run import lines, write_jsonl


def data_of(base: Path, folder: Path, output: str) -> Any:
    """A run that measures exact match before training and at each evaluation."""
    rows = [{"prompt": f"{letter}=", "completion": letter.upper()} for letter in "abcdef"]
    write_jsonl(folder / "d.jsonl", rows)
    adapter = {"dataset": "d", "eval_dataset": "d", "lora": {"r": 4, "target_modules": "all-linear"}}
    asked = {"eval_exact_match": True, "eval_steps": 2, "load_best_model_at_end": True}
    data = {
        "base_model": str(base),
        "output_dir": output,
        "device": "cpu",
        "base_gemm": "aten",
        "defaults": {"max_steps": 6, "learning_rate": 2e-2, "save_steps": 2, "max_length": 8},
        "datasets": [{"name": "d", "path": "d.jsonl", "format": "prompt_completion"}],
        "adapters": [{"name": "asked", **adapter, **asked}, {"name": "silent", **adapter}],
    }
    return resolve_config(data, folder=folder)


def test_answers_are_kept_and_a_killed_run_repeats_them(tiny_base: Path, tmp_path: Path) -> None:
    train(data_of(tiny_base, tmp_path, "whole"))
    kept = read_samples(tmp_path / "whole" / "samples.jsonl")
    assert [(each["adapter"], each["step"]) for each in kept] == [("asked", step) for step in (0, 2, 4, 6)]
    assert SAMPLES < 6
    for each in kept:
        assert [(one["prompt"], one["expected"]) for one in each["samples"]] == [
            (f"{letter}=", letter.upper()) for letter in "abcd"
        ]
        assert all(one["exact"] == (one["answer"] == one["expected"]) for one in each["samples"])
    with pytest.raises(ConnectionAbortedError):
        train(data_of(tiny_base, tmp_path, "run"), reporter=Crashing(10))
    # an evaluation after the last checkpoint, which the resumed run makes again
    with open(tmp_path / "run" / "samples.jsonl", "a") as file:
        file.write(json.dumps({"adapter": "asked", "step": 5, "samples": []}) + "\n")
    resume(tmp_path / "run")
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    found = [(tmp_path / name / "samples.jsonl").read_bytes() for name in ("run", "whole")]
    assert found[0] == found[1]
    assert [start["iteration"] for start in RunFolder(tmp_path / "whole").read_environment()] == [0]
    starts = RunFolder(tmp_path / "run").read_environment()
    assert len(starts) == 2
    assert starts[1]["iteration"] > starts[0]["iteration"] == 0


def test_long_texts_are_cut() -> None:
    long = "a" * SAMPLE_LETTERS
    found = _sample(f"begin {long}", f"{long} end", long, True)
    assert found == {"prompt": f"…{long}", "expected": f"{long}…", "answer": long, "exact": True}


def test_versions_and_machine(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_environment() == []
    note_start(folder, torch.device("cpu"), 0, ["doubt"])
    note_start(folder, torch.device("cpu"), 7, [])
    first, second = folder.read_environment()
    assert (first["iteration"], first["warnings"], second["iteration"]) == (0, ["doubt"], 7)
    assert first["versions"]["torch"] == version("torch")
    assert first["versions"]["peft"] == version("peft")
    assert first["machine"]["device"] == "cpu"
    assert first["machine"]["threads"] == torch.get_num_threads()
    assert first["began"].utcoffset() == timedelta(0)
