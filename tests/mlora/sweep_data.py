"""Sweeps over a model of a few thousand weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.mlora.tiny_run import run_data

SEARCH = {
    "learning_rate": {"low": 1e-5, "high": 1e-2, "log": True},
    "lora": {
        "r": {"low": 4, "high": 16, "step": 4},
        "target_modules": {"choice": ["all-linear", ["q_proj"]]},
    },
}


def sweep_data(base: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """A config of a sweep over rank, targets and learning rate; `changes` are of its `sweep`."""
    data = run_data(base, folder)
    del data["adapters"]
    adapter = {
        "dataset": "one",
        "eval_dataset": "two",
        "eval_steps": 2,
        "per_device_train_batch_size": 2,
        "lora": {"r": 4, "target_modules": "all-linear"},
    }
    sweep: dict[str, Any] = {"trials": 8, "places": 3, "adapter": adapter, "search": SEARCH}
    return data | {"sweep": sweep | changes}
