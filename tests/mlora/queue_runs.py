"""A task that is submitted to a run of the adapters `first` and `second`, and what becomes of tasks."""

from pathlib import Path
from typing import Any

import yaml
from mlora.cli.run_status import read_status

THIRD = {
    "name": "third",
    "dataset": "one",
    "max_steps": 5,
    "per_device_train_batch_size": 2,
    "lora": {"r": 3, "lora_dropout": 0.1, "target_modules": ["q_proj", "down_proj"]},
}


def write_task(folder: Path, **changes: Any) -> Path:
    """Write the YAML of a task; a value of none leaves its key out."""
    path = folder / f"{changes.get('name', 'third')}.yaml"
    task = {key: value for key, value in (THIRD | changes).items() if value is not None}
    path.write_text(yaml.safe_dump(task))
    return path


def states(run_dir: Path) -> dict[str, str]:
    """What `mlora status` says of each task."""
    return {name: entry["state"] for name, entry in read_status(run_dir).adapters.items()}
