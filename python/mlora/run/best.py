"""The best evaluation of each task: which it is, and its weights, in a file until the task ends.

A file, not a copy in memory: a limit on memory, preemption and pausing need not know of it. It is durable
before a checkpoint names it, and stays as long as one does, so a killed run goes on with the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlora.engine.engine import Engine
from mlora.errors import RunError
from mlora.files.state_files import StateFiles, best_file, read_state, write_state
from mlora.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor


class BestWeights:
    """Keeps the weights of each task's best evaluation, where the task asks for it.

    Args:
        engine: has the tasks' adapters.
        folder: the run's ``states``.
        files: says which files there checkpoints need.
    """

    def __init__(self, engine: Engine, folder: Path, files: StateFiles) -> None:
        self._engine, self._folder, self._files = engine, folder, files

    def evaluated(self, task: Task, entry: Mapping[str, Any]) -> bool:
        """Count an evaluation, and keep the adapter as it is now where it is the best so far.

        Args:
            task: that is on the engine.
            entry: what was measured of it now.

        Returns:
            Whether it is the best so far.

        Raises:
            RunError: the weights cannot be written.
        """
        before = task.progress.best_step
        if not compare(task, entry):
            return False
        if task.config.best_rule is not None and task.config.best_rule.loads:
            content = {**_stamp(task), "weights": self._engine.weights(task.name)}
            write_state(_path(task, self._folder), content)
            if before is not None:
                self._files.drop(best_file(task.name, before))
        return True

    def weights(self, task: Task) -> dict[str, Tensor] | None:
        """Return the weights that a task ends with; none = those that the engine has.

        Args:
            task: that ends; where it was stopped, what the engine has is in doubt.

        Raises:
            RunError: they cannot be read.
        """
        if task.kept_step is None or (task.alive and task.kept_step == task.progress.step):
            return None
        what = f"the best weights of {task.name}, of step {task.kept_step}"
        return read_state(_path(task, self._folder), "weights", _stamp(task), what)


def compare(task: Task, entry: Mapping[str, Any]) -> bool:
    """Compare an evaluation with those before it; that of step 0 does not count, as in Transformers.

    Args:
        task: whose progress takes note of it.
        entry: what was measured.

    Returns:
        Whether it is the best so far.
    """
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
    """Check that the weights of a task's best evaluation are still there, before it goes on.

    Args:
        task: that goes on.
        folder: the run's ``states``.

    Raises:
        RunError: they are not.
    """
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
    """What tells a task's file from others'."""
    return {"task": task.name, "step": task.progress.best_step}
