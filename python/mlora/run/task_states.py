"""A task's files in the run's ``states``: its state while it is set aside, and its best weights.

A task that is set aside keeps its adapter, its optimizer, its open accumulation and its counts in a file. The
position in the data and the random numbers derive from the counts, so it goes on bit for bit.

Best weights are in a file, not in memory, so the memory limit, preemption and pausing need not know of them.
The file is durable before a checkpoint names it, and stays as long as one does. So a killed run goes on with
the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from mlora.engine.engine import Engine
from mlora.engine.full_engine import FullEngine
from mlora.engine.put_adapter import lora_of
from mlora.errors import NamedRunError, RunError, first_line
from mlora.run.handoff.model_card import CARD, write_card
from mlora.store.disk import checksum_of, os_errors, write_file, write_tensors
from mlora.store.run_folder import OWN_FILES, RunFolder
from mlora.store.state_files import best_file, read_state
from mlora.tasks.task import Task
from mlora_ext.adapters.lora_config import needs_data, needs_weights
from mlora_ext.interop.peft_folder import CONFIG
from mlora_ext.interop.read_folder import read_config

if TYPE_CHECKING:
    from torch import Tensor


def restore_adapter(
    engine: Engine, task: Task, group: int, state: Mapping[str, Any], where: str = "its checkpoint"
) -> None:
    """Creates a task's adapter with a state of `Engine.state_dict`; errors name `where` it was read."""
    try:
        _create_adapter(engine, task, group, state)
        engine.load_state_dict(task.name, state)
    except ValueError as error:
        raise NamedRunError(task.name, f"cannot be restored: {where}: {first_line(error)}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise NamedRunError(
            task.name,
            f"cannot be restored: {where} does not hold an adapter's state "
            f"({type(error).__name__}: {first_line(error)})",
        ) from error


def _create_adapter(engine: Engine, task: Task, group: int, state: Mapping[str, Any] | None = None) -> None:
    """Creates a task's adapter as before its first step; groups go to the replicas in turn.

    If a `state` will be loaded, the adapter gets its ranks, and no initial values that depend on data or on
    weights in files.
    """
    lora = task.lora
    more: dict[str, Any] = {}
    begins = state is None and task.config.init_from is None
    if state is not None and "lora" in state:
        lora = lora_of(state["lora"])
    elif begins and lora is not None and needs_data(lora):
        more = {"start_batches": task.start_batches()}
    elif begins and lora is not None and needs_weights(lora):
        more = {"start_weights": engine.source}
    engine.create_adapter(
        task.name,
        lora,
        task.optim,
        objective=task.config.objective,
        init_from=task.config.init_from,
        seed=task.seed,
        replica=group % engine.replicas,
        **more,
    )


def state_file(task: Task) -> str:
    """Returns the name of the file that holds a task's state while it is set aside."""
    return f"{task.name}-{task.progress.batches:08d}.pt"


def set_aside(engine: Engine, task: Task, folder: Path) -> None:
    """Writes a task's state to its file and takes the adapter off the engine.

    A task that has not begun needs no file. If the file cannot be written, the adapter stays.
    """
    if task.progress.batches:
        write_tensors(folder / state_file(task), {**_stamp(task), "state": engine.state_dict(task.name)})
    engine.remove_adapter(task.name)


def keep_for_longer(engine: Engine, task: Task, folder: RunFolder) -> None:
    """Writes what a larger ``max_steps`` goes on from: the state after the last step, the best weights.

    A model whose own weights were trained goes on in a new run.
    """
    if isinstance(engine, FullEngine):
        return
    state = {**_stamp(task), "state": engine.state_dict(task.name)}
    write_tensors(folder.finished / state_file(task), state)
    if task.kept_step is not None:
        best = _best_path(task, folder.states)
        with os_errors(f"{folder.finished}: cannot be saved"):
            write_file(folder.finished / best.name, best.read_bytes())


def longer_files(task: Task) -> list[str]:
    """Returns the names of the files of `keep_for_longer`."""
    best = [] if task.kept_step is None else [best_file(task.name, task.kept_step)]
    return [state_file(task), *best]


def bring_back(engine: Engine, task: Task, group: int, folder: Path) -> None:
    """Puts a task's adapter back on the engine, or a new adapter if the task has not begun."""
    if not task.progress.batches:
        _create_adapter(engine, task, group)
        return
    path = folder / state_file(task)
    what = f"the state of {task.name} after {task.progress.batches} micro-batches"
    restore_adapter(engine, task, group, read_state(path, "state", _stamp(task), what), str(path))


def _stamp(task: Task) -> dict[str, Any]:
    """Returns the values that identify the file of a task that is set aside."""
    return {"task": task.name, "batches": task.progress.batches}


def compare(task: Task, entry: Mapping[str, Any]) -> bool:
    """Notes an evaluation and returns whether it is the best so far; like Transformers, ignores step 0."""
    rule, progress = task.config.best_rule, task.progress
    if rule is None or entry["step"] == 0:
        return False
    value = entry[rule.metric]
    gain = rule.gain(value, progress.best) if math.isfinite(value) else math.nan
    progress.worse = 0 if gain > task.config.early_stopping_threshold else progress.worse + 1
    if not gain > 0:
        return False
    progress.best, progress.best_step = value, entry["step"]
    return True


def never_best(task: Task) -> str | None:
    """Returns a warning on the first evaluation after step 0 that cannot be the best; None: it is another."""
    rule, found = task.config.best_rule, task.progress.evaluations
    if rule is None:
        return None
    steps = [one["step"] for one in found if one["step"] and not math.isfinite(one.get(rule.metric, 0.0))]
    if steps != [found[-1]["step"]]:
        return None
    return (
        f"{task.name}: metric_for_best_model: {rule.metric} is {found[-1][rule.metric]} at step {steps[0]}; "
        "an evaluation without a finite value is never the best"
    )


def write_best(engine: Engine, task: Task, folder: Path) -> None:
    """Keeps the present weights of a task, whose last evaluation is its best."""
    stamp = {"task": task.name, "step": task.kept_step}
    write_tensors(_best_path(task, folder), {**stamp, "weights": engine.weights(task.name)})


def read_best(task: Task, folder: Path, *, in_doubt: bool) -> dict[str, Tensor] | None:
    """Returns the weights that a task ends with; None = those on the engine.

    If those on the engine are `in_doubt`, the weights of the file count, if there is one.
    """
    if task.kept_step is None or (task.kept_step == task.progress.step and not in_doubt):
        return None
    what = f"the best weights of {task.name}, of step {task.kept_step}"
    stamp = {"task": task.name, "step": task.kept_step}
    return read_state(_best_path(task, folder), "weights", stamp, what)


def save_result(engine: Engine, task: Task, folder: RunFolder, *, in_doubt: bool = False) -> None:
    """Writes the adapter with which a task ends, with its card; `in_doubt` is for `read_best`.

    The task is on the engine. Raises RunError if the folder cannot be written.
    """
    target = folder.adapters / task.name
    try:
        engine.save(task.name, target, read_best(task, folder.states, in_doubt=in_doubt))
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise RunError(f"{target}: cannot be saved: {reason}") from error
    with os_errors(f"{target}: cannot be read"):
        own = {path for path in target.iterdir() if OWN_FILES.fullmatch(f"adapters/{task.name}/{path.name}")}
        files = [path for path in own if path.name != CARD and path.is_file()]
        task.progress.saved = {path.name: checksum_of(path) for path in sorted(files)}
    if (target / CONFIG).is_file():  # a model that was trained itself is no adapter
        lora = read_config(target)
        write_card(target, lora, task.config, task.saved_step, str(lora.base_model_name_or_path))


def _best_path(task: Task, folder: Path) -> Path:
    assert task.kept_step is not None
    return folder / best_file(task.name, task.kept_step)
