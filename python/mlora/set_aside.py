"""A task's adapter on and off the engine: created, set aside on disk, brought back bit for bit.

A task that gives way to others keeps its adapter, its optimizer, what it has accumulated and its counts in a
file of the run's ``states``, which carries the number of micro-batches it has taken; its place in the data
and its random numbers derive from its counts.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mlora.checkpoint import write_file
from mlora.engine import Engine
from mlora.errors import RunError, first_line
from mlora.tasks import Task


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
        init_from=task.config.init_from,
        seed=task.seed,
        replica=group % engine.replicas,
    )


def restore_adapter(engine: Engine, task: Task, group: int, state: Mapping[str, Any]) -> None:
    """Create a task's adapter as it was.

    Args:
        engine: where.
        task: what.
        group: the task's.
        state: of `Engine.state_dict`.

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
            f"{task.name}: cannot be restored: its checkpoint does not hold an adapter's state "
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
    import torch

    if task.progress.batches:
        name = f"{task.name}-{task.progress.batches:08d}.pt"
        state = engine.state_dict(task.name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / name, lambda file: torch.save(state, file))
        except (OSError, RuntimeError) as error:
            # torch reports a failed write as a RuntimeError whose context is the system's error
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            raise RunError(f"{folder / name}: cannot be saved: {cause.strerror}") from error
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
    import torch

    if task.kept is None:
        create_adapter(engine, task, group)
        return
    path = folder / task.kept
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = getattr(error, "strerror", None) or "it is damaged or not whole"
        raise RunError(f"{path}: cannot be read: {reason}; {task.name} cannot go on") from error
    restore_adapter(engine, task, group, state)
    task.kept = None


def prune(folder: Path, wanted: Collection[str]) -> None:
    """Remove files of tasks that no checkpoint refers to any more.

    Args:
        folder: the run's ``states``, which may be missing.
        wanted: names of those that stay.
    """
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name not in wanted:
                path.unlink(missing_ok=True)
