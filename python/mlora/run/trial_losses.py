"""Calls losses of one's own once before training, on made-up log-probabilities of the right shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mlora.data.packing import PackedBatch, pack
from mlora.data.preference import joined
from mlora.objectives.registry import name_of
from mlora.objectives.token_losses import Owners, by_objective
from mlora.tasks.task import Task


def faults_of_own_losses(tasks: Sequence[Task], device: torch.device) -> dict[str, str]:
    """Returns why losses of one's own fail, by the tasks' names; builtin and registered ones are not tried.

    Each gets what it would get of the task's first micro-batch, but for the numbers.
    """
    own = [task for task in tasks if ":" in name_of(task.config.objective) and task.data.samples]
    found = {task.name: _fault(task, device) for task in own}
    return {name: fault for name, fault in found.items() if fault}


def _fault(task: Task, device: torch.device) -> str:
    samples = [task.data.samples[row] for row in task.plan.batch(0)]
    batch = pack({task.name: joined(task.name, samples, task.objective)})
    counts = batch.rows_of_owners()
    owners = Owners(
        counts, [1.0], [task.objective], batch.trained_lengths(), batch.facts, **_silent(batch, device)
    )
    with torch.enable_grad():
        *_, faults = by_objective(_made_up(sum(counts), device), owners)
    return faults[0]


def _silent(batch: PackedBatch, device: torch.device) -> dict[str, Any]:
    """Returns made-up log-probabilities of the sequences without gradient."""
    if batch.silent is None:
        return {}
    lengths = [length for own in batch.silent.trained_lengths() for length in own]
    return {"reads": batch.reads, "silent": [_made_up(length, device) for length in lengths]}


def _made_up(count: int, device: torch.device) -> torch.Tensor:
    """Returns `[count]` fp32, log-probabilities of tokens."""
    return torch.linspace(-4.0, -0.1, count, device=device)
