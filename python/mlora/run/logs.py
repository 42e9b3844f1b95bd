"""The values of a line of ``metrics.jsonl`` as Transformers' ``Trainer`` logs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlora.tasks.task import Task


def epoch_of(task: Task) -> float:
    """Returns how many times a task has passed its data, counted in micro-batches as ``Trainer`` does."""
    return task.progress.batches / max(1, task.plan.batches_per_epoch)


def logs_of(task: Task, record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a task's latest line, and its ``epoch``."""
    numbers = {
        key: value
        for key, value in record.items()
        if key not in ("adapter", "step") and type(value) in (int, float)
    }
    return {**numbers, "epoch": epoch_of(task)}
