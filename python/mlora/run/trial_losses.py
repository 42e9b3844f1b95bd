"""Calls losses of one's own once before training, on made-up log-probabilities of the right shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from mlora.data.micro_batch import MicroBatch
from mlora.data.packing import pack
from mlora.data.preference import joined
from mlora.objectives.custom import NOT_RUN
from mlora.objectives.function_file import renew
from mlora.objectives.registry import name_of, objective_of
from mlora.objectives.token_losses import Owners, by_objective
from mlora.tasks.task import Task


def faults_of_own_losses(
    tasks: Sequence[Task],
    device: torch.device,
    metric: str = "",
    warn: Callable[[str], None] = lambda line: None,
) -> dict[str, str]:
    """Returns why losses of one's own fail, by the tasks' names; builtin and registered ones are not tried.

    Each gets what it would get of the task's first micro-batch, but for the numbers. One that does not report
    `metric_for_best_model`, or the sweep's `metric` if there is one, fails, too. A loss that is not a number
    may be one of real numbers: it is a warning. Training sees files of losses, and torch's random numbers, as
    if nothing had been called.
    """
    named = {task.name: name_of(task.config.objective) for task in tasks if task.data.samples}
    own = [task for task in tasks if ":" in named.get(task.name, "") and named[task.name] != NOT_RUN]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        found = {task.name: _fault(task, device, metric, warn) for task in own}
        for reason in renew({name_of(task.config.objective) for task in own}):
            warn(f"{reason}; so it is not executed anew after its trial call, which counts as its first call")
    return {name: fault for name, fault in found.items() if fault}


def _fault(task: Task, device: torch.device, metric: str, warn: Callable[[str], None]) -> str:
    fault, found, loss = _called(task, device, trains=True)
    if not fault and not math.isfinite(loss):
        warn(f"{task.name}: objective: the loss of made-up log-probabilities is {loss}")
    lacking = {} if fault else _lacking(task, metric, found)
    if lacking:  # evaluations call it without gradients, which may have metrics of their own
        fault, found, _ = _called(task, device, trains=False)
        lacking = {} if fault else _lacking(task, metric, found)
    return next((not_measured(*one, found) for one in lacking.items()), fault)


def _lacking(task: Task, metric: str, found: Collection[str]) -> dict[str, str]:
    """Returns the asked metrics that are not found, by the keys that ask for them."""
    rule = task.config.best_rule
    asked = {"metric_for_best_model": "" if rule is None else rule.metric, "sweep.metric": metric}
    return {key: one for key, one in asked.items() if one not in ("", "eval_exact_match", *found)}


def not_measured(key: str, metric: str, found: Collection[str]) -> str:
    """Returns what to say where evaluations lack a metric that a key asks for."""
    return f"{key}: {metric} is not measured; metrics: {', '.join(found)}"


def _called(task: Task, device: torch.device, *, trains: bool) -> tuple[str, list[str], float]:
    """Returns why a task's objective fails, or nothing, its metrics' names in evaluations, and its loss."""
    objective = objective_of(task.config.objective)  # the task's own would keep what is not executed anew
    samples = [task.data.samples[row] for row in task.plan.batch(0)]
    batch = pack({task.name: joined(task.name, samples, objective)})
    counts = batch.counts
    owners = Owners(counts, [1.0], [objective], batch.trained, batch.facts, **_silent(batch, device))
    with torch.set_grad_enabled(trains):
        _, (loss,), (metrics,), (fault,) = by_objective(_made_up(sum(counts), device), owners)
    return fault, list(dict.fromkeys(["eval_loss", *(f"eval_{name}" for name in metrics)])), float(loss)


def _silent(batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    """Returns made-up log-probabilities of the sequences without gradient."""
    if batch.silent is None:
        return {}
    lengths = [length for own in batch.silent.trained for length in own]
    return {"reads": batch.reads, "silent": [_made_up(length, device) for length in lengths]}


def _made_up(count: int, device: torch.device) -> torch.Tensor:
    """Returns `[count]` fp32, log-probabilities of tokens."""
    return torch.linspace(-4.0, -0.1, count, device=device)
