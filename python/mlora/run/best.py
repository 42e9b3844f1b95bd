"""Finds the best evaluation of each task and keeps its weights in a file until the task ends.

The weights are in a file, not in memory, so the memory limit, preemption and pausing need not know of them.
The file is durable before a checkpoint names it, and stays as long as one does. So a killed run goes on with
the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlora.engine.engine import Engine
from mlora.errors import RunError
from mlora.files.disk import write_tensors
from mlora.files.state_files import StateFiles, best_file, read_state
from mlora.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor


class BestWeights:
    """Keeps the weights of each task's best evaluation, if the task asks for it."""

    def __init__(self, engine: Engine, folder: Path, files: StateFiles) -> None:
        self._engine, self._folder, self._files = engine, folder, files

    def evaluated(self, task: Task, entry: Mapping[str, Any]) -> bool:
        """Counts an evaluation and returns whether it is the best so far; if so, keeps the weights."""
        before = task.progress.best_step
        if not compare(task, entry):
            return False
        if task.config.best_rule is not None and task.config.best_rule.loads:
            content = {**_stamp(task), "weights": self._engine.weights(task.name)}
            write_tensors(_path(task, self._folder), content)
            if before is not None:
                self._files.drop(best_file(task.name, before))
        return True

    def weights(self, task: Task) -> dict[str, Tensor] | None:
        """Returns the weights that a task ends with; None = those on the engine.

        A stopped task ends with the weights of its file, if it has one: those on the engine are in doubt.
        """
        if task.kept_step is None or (task.alive and task.kept_step == task.progress.step):
            return None
        what = f"the best weights of {task.name}, of step {task.kept_step}"
        return read_state(_path(task, self._folder), "weights", _stamp(task), what)


def compare(task: Task, entry: Mapping[str, Any]) -> bool:
    """Notes an evaluation and returns whether it is the best so far; like Transformers, ignores step 0."""
    rule, progress = task.config.best_rule, task.progress
    if rule is None or entry["step"] == 0:
        return False
    gain = rule.gain(entry[rule.metric], progress.best)
    progress.worse = 0 if gain > task.config.early_stopping_threshold else progress.worse + 1
    if not gain > 0:
        return False
    progress.best, progress.best_step = entry[rule.metric], entry["step"]
    return True


def check_best_file(task: Task, folder: Path) -> None:
    """Raises RunError if the weights of a task's best evaluation are gone."""
    rule, step = task.config.best_rule, task.progress.best_step
    if rule and rule.loads and step is not None and not _path(task, folder).is_file():
        raise RunError(
            f"{task.name}: its weights of step {step}, the best so far, are gone: there is no "
            f"{_path(task, folder)}; put it back, or train anew with --overwrite"
        )


def _path(task: Task, folder: Path) -> Path:
    assert task.progress.best_step is not None
    return folder / best_file(task.name, task.progress.best_step)


def _stamp(task: Task) -> dict[str, Any]:
    """Returns the values that identify a task's file."""
    return {"task": task.name, "step": task.progress.best_step}
