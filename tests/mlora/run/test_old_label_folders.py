"""Folders of classifiers as older versions of PEFT write them, with `adapter_model.bin`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.config.config_file import resolve_config
from mlora.data.record import LabelledSample
from mlora.engine.engine import Engine
from mlora.optim.optim_config import OptimConfig
from mlora.run.run import train
from peft import LoraConfig
from safetensors.torch import load_file
from tiny_run import write_jsonl

OPTIM = OptimConfig(1e-2, total_steps=4)
SAMPLES = {
    "SEQ_CLS": [LabelledSample.of_sequence((5, 6, 7), 2)],
    "TOKEN_CLS": [LabelledSample((5, 6, 7), (0, 2, 1))],
}


def pickled(engine: Engine, task: str, folder: Path, drop: str = "none") -> Path:
    """The folder of a new adapter of three labels; without the tensors whose keys hold `drop`."""
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type=task, init_lora_weights=False)
    engine.create_adapter(task, lora, OPTIM, num_labels=3)
    engine.save(task, folder)
    weights = load_file(folder / "adapter_model.safetensors")
    torch.save({k: t for k, t in weights.items() if drop not in k}, folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    return folder


@pytest.mark.parametrize("task", [*SAMPLES])
def test_an_engine_loads_them(tiny_base: Path, tmp_path: Path, task: str) -> None:
    with Engine(tiny_base) as engine:
        folder = pickled(engine, task, tmp_path / "old")
        engine.load("again", folder, OPTIM)
        engine.create_adapter("named", None, OPTIM, init_from=folder, num_labels=3)
        found = engine.evaluate(dict.fromkeys((task, "again", "named"), SAMPLES[task]))
        assert found["again"] == found["named"] == found[task]


def test_a_run_goes_on_from_them(tiny_base: Path, tmp_path: Path) -> None:
    with Engine(tiny_base) as engine:
        folder = pickled(engine, "SEQ_CLS", tmp_path / "old")
        engine.remove_adapter("SEQ_CLS")
        headless = pickled(engine, "SEQ_CLS", tmp_path / "headless", drop="score")
        write_jsonl(tmp_path / "kinds.jsonl", [{"text": "a", "label": 2}])
        adapters: list[dict[str, Any]] = [
            {"name": "plain", "init_from": str(folder)},
            {"name": "named", "init_from": str(folder), "num_labels": 3},
            {"name": "wrong", "init_from": str(folder), "num_labels": 4},
            {"name": "headless", "init_from": str(headless)},
            {"name": "headless-named", "init_from": str(headless), "num_labels": 3},
        ]
        data = {
            "base_model": str(tiny_base),
            "output_dir": "run",
            "defaults": {"max_steps": 1},
            "datasets": [{"name": "kinds", "path": "kinds.jsonl", "format": "classification"}],
            "adapters": [one | {"dataset": "kinds"} for one in adapters],
        }
    found = train(resolve_config(data, folder=tmp_path)).adapters
    no_head = f"init_from: {headless} holds no head (classifier or score) among its weights"
    assert {name: one.message for name, one in found.items() if one.state != "finished"} == {
        "wrong": "num_labels: is 4, but that of the head in init_from is 3",
        "headless": no_head,
        "headless-named": no_head,
    }
    assert (tmp_path / "run" / "adapters" / "plain" / "adapter_model.safetensors").is_file()
