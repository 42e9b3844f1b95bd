"""A task's adapter on and off the engine: created, set aside on disk, brought back bit for bit.

A task that gives way to others keeps its adapter, its optimizer, what it has accumulated and its counts in a
file of the run's ``states``, which carries the number of micro-batches it has taken; its place in the data
and its random numbers derive from its counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlora.engine.engine import Engine
from mlora.errors import RunError, first_line
from mlora.files.state_files import read_state, write_state
from mlora.tasks.task import Task


def create_adapter(engine: Engine, task: Task, group: int) -> None:
    """Create a task's adapter as it is before its first step; groups go to the replicas in turn.

    Args:
        engine: where.
        task: what.
        group: the task's.

    Raises:
        ValueError: the engine refuses the adapter.
    """
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
    """Create a task's adapter as it was.

    Args:
        engine: where.
        task: what.
        group: the task's.
        state: of `Engine.state_dict`.
        where: it was read.

    Raises:
        RunError: the state is not this adapter's.
    """
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
    """Take a task's adapter off the engine, and keep what it needs to go on.

    Args:
        engine: that has it.
        task: whose; ``kept`` then names the file, unless it has not begun.
        folder: the run's ``states``.

    Raises:
        RunError: the file cannot be written; the adapter is as before.
    """
    if task.progress.batches:
        name = f"{task.name}-{task.progress.batches:08d}.pt"
        write_state(folder / name, {**_stamp(task), "state": engine.state_dict(task.name)})
        task.kept = name
    engine.remove_adapter(task.name)


def bring_back(engine: Engine, task: Task, group: int, folder: Path) -> None:
    """Put a task's adapter on the engine: as it was, or new where it has not begun.

    Args:
        engine: where.
        task: whose.
        group: the task's.
        folder: the run's ``states``.

    Raises:
        ValueError: the engine refuses a new adapter.
        RunError: the file cannot be read, or is not this adapter's.
    """
    if task.kept is None:
        create_adapter(engine, task, group)
        return
    path = folder / task.kept
    what = f"the state of {task.name} after {task.progress.batches} micro-batches"
    restore_adapter(engine, task, group, read_state(path, "state", _stamp(task), what), str(path))
    task.kept = None


def _stamp(task: Task) -> dict[str, Any]:
    """What tells a task's file from others'."""
    return {"task": task.name, "batches": task.progress.batches}
