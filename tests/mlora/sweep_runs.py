"""Sweeps of small adapters, their tables, and who trains at once."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from limited_runs import Watching
from mlora.config.config_file import resolve_config
from mlora.run.run import train
from mlora.tasks.result import RunResult

RATES = {"learning_rate": {"low": 1e-4, "high": 5e-2, "log": True}, "lora": {"r": {"choice": [2, 4, 8]}}}


def sweep(data: dict[str, Any], folder: Path, name: str = "run", reporter: Any = None) -> RunResult:
    return train(resolve_config(data | {"output_dir": name}, folder=folder), reporter=reporter)


def table(run: Path) -> list[dict[str, str]]:
    with open(run / "sweep.csv") as file:
        return list(csv.DictReader(file))


class Crowd(Watching):
    """Notes which adapters step in each iteration."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.places, self.alive = places, set[str]()
        self.most = 0

    def joined(self, task: Any, tasks: Any) -> None:
        self.alive.add(task.name)
        self.most = max(self.most, len(self.alive))
        assert len(self.alive) <= self.places

    def changed(self, task: Any) -> None:
        self.alive.discard(task.name)
        self.lines.append(f"{task.name}: {task.progress.state}")
