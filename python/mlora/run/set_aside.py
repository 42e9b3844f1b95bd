"""Puts a task's adapter on the engine, sets it aside on disk, and brings it back bit for bit.

A task that is set aside keeps its adapter, its optimizer, its open accumulation and its counts in a file of
the run's ``states``. The file's name carries the number of micro-batches taken. The position in the data and
the random numbers derive from the counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlora.engine.engine import Engine
from mlora.errors import RunError, first_line
from mlora.files.disk import write_tensors
from mlora.files.state_files import read_state
from mlora.tasks.task import Task


def create_adapter(engine: Engine, task: Task, group: int) -> None:
    """Creates a task's adapter as before its first step; groups go to the replicas in turn."""
    engine.create_adapter(
        task.name,
        task.lora,
        task.optim,
        objective=task.config.objective,
        init_from=task.config.init_from,
        seed=task.seed,
        replica=group % engine.replicas,
    )


def restore_adapter(
    engine: Engine, task: Task, group: int, state: Mapping[str, Any], where: str = "its checkpoint"
) -> None:
    """Creates a task's adapter with a state of `Engine.state_dict`; errors name `where` it was read."""
    try:
        create_adapter(engine, task, group)
        engine.load_state_dict(task.name, state)
    except ValueError as error:
        raise RunError(f"{task.name}: cannot be restored: {first_line(error)}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{task.name}: cannot be restored: {where} does not hold an adapter's state "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error


def set_aside(engine: Engine, task: Task, folder: Path) -> None:
    """Writes a task's state to a file, names it in ``kept``, and takes the adapter off the engine.

    A task that has not begun needs no file. If the file cannot be written, the adapter stays.
    """
    if task.progress.batches:
        name = f"{task.name}-{task.progress.batches:08d}.pt"
        write_tensors(folder / name, {**_stamp(task), "state": engine.state_dict(task.name)})
        task.kept = name
    engine.remove_adapter(task.name)


def bring_back(engine: Engine, task: Task, group: int, folder: Path) -> None:
    """Puts a task's adapter back on the engine, or a new adapter if the task has not begun."""
    if task.kept is None:
        create_adapter(engine, task, group)
        return
    path = folder / task.kept
    what = f"the state of {task.name} after {task.progress.batches} micro-batches"
    restore_adapter(engine, task, group, read_state(path, "state", _stamp(task), what), str(path))
    task.kept = None


def _stamp(task: Task) -> dict[str, Any]:
    """Returns the values that identify a task's file."""
    return {"task": task.name, "batches": task.progress.batches}
