"""The example of a sweep: its trials take turns in its places, and the best of them is named."""

import json
from pathlib import Path

import make_tasks
import mlora
from mlora.config.config_file import load_config

EXAMPLE = Path(make_tasks.__file__).parent / "sweep.yaml"


def test_a_short_sweep(tmp_path: Path) -> None:
    short = [f"output_dir={tmp_path / 'run'}", "sweep.trials=3", "sweep.places=2", "sweep.pruner=none"]
    short += ["defaults.max_steps=2", "defaults.eval_steps=2", "defaults.per_device_train_batch_size=2"]
    result = mlora.train(load_config(EXAMPLE, short))
    assert result.status == "finished", result
    assert len(result.adapters) == 3
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    judged = {line["adapter"] for line in lines if "eval_loss" in line and line["step"] == 2}
    assert judged == set(result.adapters)
