"""Runs under a limit on memory for tests, with a memory that is the same on every machine.

What is measured is replaced: the base takes nothing, each task's states as much as `TASK`, and micro-batches
a kibibyte a row, so that the limit says how many tasks fit.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from mlora.config.config_file import resolve_config
from mlora.engine.engine import Engine
from mlora.memory.adapter_memory import AdapterMemory
from mlora.memory.estimate import MemoryEstimate
from mlora.memory.room import RESERVED, MemoryLimit
from mlora.run.reporter import Reporter
from mlora.run.run import resume
from mlora.store.queue import TaskQueue
from mlora.tasks.task import Task

from tests.mlora.tiny_run import run_data
from tests.tolerances import STEADY_EPSILON

MIB = 2**20
TASK = 100 * MIB


def replace_memory(patch: pytest.MonkeyPatch) -> None:
    """Let nothing be measured; see this module."""

    def dry_run(self: AdapterMemory, names: Sequence[str]) -> Any:
        shapes = [[4], [40], [10] * 8]
        phases = [[1024 * sum(shape), 512 * sum(shape), 0] for shape in shapes]
        places = len(self._stages)
        return [(s, [p] * places) for s, p in zip(shapes, phases, strict=True)]

    patch.setattr(Engine, "used_memory", lambda self: [0] * self.stages)
    patch.setattr("mlora.run.prepare.left_by_runs", lambda _: 0)
    patch.setattr(MemoryLimit, "took", lambda *_: None)
    patch.setattr(AdapterMemory, "admitted", lambda self, name: (TASK,) * len(self._stages))
    patch.setattr(AdapterMemory, "_dry_run", dry_run)
    patch.setattr(MemoryEstimate, "observe", lambda *_: None)


def limit_for(tasks: int) -> int:
    """A limit under which so many tasks fit."""
    return RESERVED + tasks * TASK + 10 * MIB


def five_tasks(base: Path, folder: Path, *, fit: int = 2, **changes: Any) -> dict[str, Any]:
    """A config of five tasks of different kinds and priorities, of which `fit` fit at once.

    In their order: `high`, `first`, `second`, `third`, `low`. After the first step of `high`, `first` is in
    the middle of an accumulation.
    """
    data = run_data(base, folder)
    lora = {"r": 3, "lora_dropout": 0.1, "target_modules": "all-linear"}
    more = [
        {"name": "third", "dataset": "one", "max_steps": 4, "optim": "sgd", "lora": lora},
        {"name": "low", "dataset": "one", "max_steps": 5, "priority": -1, "lora": {**lora, "r": 2}},
        {
            "name": "high",
            "dataset": "two",
            "eval_dataset": "one",
            "max_steps": 4,
            "gradient_accumulation_steps": 2,
            "priority": 3,
            "lora": lora,
        },
    ]
    data["adapters"] += more
    data["adapters"][0] |= {"max_steps": 3}
    data["adapters"][1] |= {"max_steps": 7}
    data["defaults"]["adam_epsilon"] = STEADY_EPSILON
    data["scheduler"] = {"memory_limit": limit_for(fit)}
    return data | changes


def submission(data: dict[str, Any], folder: Path, name: str, **fields: Any) -> dict[str, Any]:
    """What `mlora submit` puts into the queue for a task of the data set `two`."""
    adapter = {
        "name": name,
        "dataset": "two",
        "max_steps": 3,
        "lora": {"r": 5, "lora_dropout": 0.1, "target_modules": "all-linear"},
        **fields,
    }
    config = resolve_config(data | {"adapters": [*data["adapters"], adapter]}, folder=folder)
    datasets = [d.model_dump() for d in config.datasets if d.name in (adapter["dataset"],)]
    return {"adapter": config.adapters[-1].model_dump(), "datasets": datasets}


When = int | tuple[str, int]


class Watching(Reporter):
    """Notes which adapter stepped when, and does things.

    Args:
        actions: what is done after which step of a task, or after how many of all tasks together.
    """

    def __init__(self, actions: Mapping[When, Callable[[], object]] | None = None) -> None:
        self.actions = actions or {}
        self.steps: list[tuple[str, int]] = []
        self.lines: list[str] = []
        self.waiting: list[list[str]] = []

    def waits(self, names: Sequence[str], went_on: Sequence[str]) -> None:
        self.waiting.append(list(names))

    def step(self, task: Task, record: dict[str, Any]) -> None:
        self.steps.append((task.name, record["step"]))
        for when in (self.steps[-1], len(self.steps)):
            if when in self.actions:
                self.actions[when]()

    def note(self, line: str) -> None:
        self.lines.append(line)

    def warn(self, line: str) -> None:
        self.lines.append(line)

    def fault(self, line: str) -> None:
        self.lines.append(line)


def interrupt() -> None:
    """Ask this process to stop."""
    os.kill(os.getpid(), signal.SIGINT)


def die() -> None:
    """End as if the process died."""
    raise ConnectionAbortedError("died")


def ask(run: Path, kind: Any, task: str, content: dict[str, Any] | None = None) -> None:
    """Ask something of a run, once."""
    with TaskQueue(run / "queue.sqlite") as queue:
        if not any((r.kind, r.task) == (kind, task) for r in queue.requests()):
            queue.ask(kind, task, content)


def decisions(run: Path) -> dict[int, list[str]]:
    """Who was admitted at which iteration, the first one first."""
    with TaskQueue(run / "queue.sqlite") as queue:
        return {iteration: list(entry["admission"]["slots"]) for iteration, entry in queue.entries().items()}


def undisturbed(run: Path, folder: Path) -> Path:
    """A run of the same requests and decisions as another one, that nothing has disturbed."""
    folder.mkdir()
    for name in ("config.yaml", "queue.sqlite"):
        shutil.copy(run / name, folder / name)
    assert resume(folder).exit_code == 0
    assert decisions(folder) == decisions(run)
    return folder
