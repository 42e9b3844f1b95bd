"""Predicts a run's micro-batches from one of them."""

from __future__ import annotations

from collections.abc import Sequence

from mlora.engine.engine import Engine
from mlora.errors import RunError, first_line
from mlora.tasks.task import Task


def forecast_lines(engine: Engine, tasks: Sequence[Task]) -> list[str]:
    """Runs the next batch of some tasks, drops its gradients, and returns what is predicted of such batches.

    No task has moved then. Raises RunError if `offload.device_memory` is too small.
    """
    batches = {
        task.name: [task.data.samples[row] for row in task.plan.batch(task.progress.batches)]
        for task in tasks
    }
    if not batches:
        return []
    try:
        found = engine.forecast(batches)
    except ValueError as error:
        raise RunError(f"offload.device_memory: {first_line(error)}") from error
    several = len(found) > 1
    return [
        f"stage {stage}: {line}" if several else line
        for stage, forecast in enumerate(found)
        for line in forecast.lines()
    ]
