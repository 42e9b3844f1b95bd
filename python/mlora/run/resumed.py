"""What a resume goes on with: whether anything is left to do, what the checkpoint counts on, more steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlora.config.run_config import RunConfig
from mlora.errors import RunError
from mlora.run.reporter import Reporter, some
from mlora.run.resumed_config import changed_key
from mlora.store.checkpoint import list_checkpoints, read_checkpoint
from mlora.store.disk import check_tensors, os_errors, write_file
from mlora.store.queue import TaskQueue, has_news
from mlora.store.run_folder import RunFolder
from mlora.store.state_files import lost_file
from mlora.sweep.ranking import trials_begun
from mlora.tasks.result import AdapterResult, RunResult
from mlora.tasks.task import ALIVE


def lost_of(folder: RunFolder, config: RunConfig, checkpoint: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with a file that a checkpoint counts on, or None."""
    before = checkpoint["total_steps"]
    longer = [each.name for each in config.adapters if each.max_steps > before.get(each.name, each.max_steps)]
    return lost_file(folder, checkpoint, longer)


def came_before(
    config: RunConfig, folder: RunFolder, checkpoint: Mapping[str, Any], queue: TaskQueue
) -> dict[str, Mapping[str, Any]]:
    """Returns the submissions and trials that a checkpoint holds, by name, if the run can go on from it."""
    changed = changed_key(checkpoint["config"], config.model_dump())
    if changed:
        raise RunError(
            f"{folder.config}: {changed} changed since the checkpoint; put it back, or train anew "
            "with `mlora train RUN.yaml --overwrite`"
        )
    for name, task in checkpoint["tasks"].items():
        if task["state"] == "finished" and not (folder.adapters / name).is_dir():
            raise RunError(
                f"{name}: has ended, but {folder.adapters / name} is gone, and checkpoints hold adapters in "
                "training only; put it back, or train anew with `mlora train RUN.yaml --overwrite`"
            )
    taken = checkpoint["decisions"]["taken"]
    came: dict[str, Mapping[str, Any]] = {
        r.task: r.content for r in queue.requests() if r.kind == "submit" and r.number <= taken
    }
    came |= trials_begun(queue, checkpoint["iteration"])
    known = {adapter.name for adapter in config.adapters} | set(came)
    lost = [name for name in checkpoint["tasks"] if name not in known]
    if lost:
        raise RunError(
            f"{folder.queue}: lacks {some(lost)}, which the checkpoint holds; put back the file that was "
            "there, or train anew with `mlora train RUN.yaml --overwrite`"
        )
    return came


def finished_result(folder: RunFolder, config: RunConfig) -> RunResult | None:
    """Returns the result of a run that has nothing left to do, else None."""
    summary = folder.read_summary()
    if summary is None or summary["status"] not in ("finished", "failed", "paused"):
        return None
    if has_news(folder.queue) or _more_trials(folder, config) or _raised_in(config, summary):
        return None
    if _is_damaged(folder, config):
        return None
    adapters = {name: AdapterResult(**entry) for name, entry in summary["adapters"].items()}
    return RunResult(summary["status"], folder.path, summary["seconds"], adapters)


def _is_damaged(folder: RunFolder, config: RunConfig) -> bool:
    """Whether a file of a run that has ended is not as its last checkpoint found it."""
    try:
        newest = [read_checkpoint(path) for path in list_checkpoints(folder.checkpoints)[-1:]]
    except RunError:  # nothing needs it any more
        return False
    return any(lost_of(folder, config, checkpoint) for checkpoint in newest)


def _more_trials(folder: RunFolder, config: RunConfig) -> bool:
    """Whether a sweep's config now asks for more trials than have begun."""
    sweep = config.sweep
    if sweep is None or not folder.queue.is_file():
        return False
    with TaskQueue(folder.queue) as queue:
        return sum(1 for _ in trials_begun(queue)) < sweep.count


def _raised_in(config: RunConfig, summary: Mapping[str, Any]) -> list[str]:
    """Returns the adapters that had made all their steps, by the run's summary, and have more to make now."""
    entries = summary["adapters"]
    return [
        adapter.name
        for adapter in config.adapters
        if _more(adapter.max_steps, entries.get(adapter.name, {"state": ""}))
    ]


def _more(steps: int, entry: Mapping[str, Any]) -> bool:
    done = entry["state"] == "finished" and entry["step"] >= entry["max_steps"]
    return bool(done and steps > entry["max_steps"])


def continue_longer(
    config: RunConfig, folder: RunFolder, checkpoint: dict[str, Any], reporter: Reporter
) -> None:
    """Lets adapters of a checkpoint go on that had made all their steps and have more to make now.

    They become running, as tasks that were set aside: their files are copied from ``finished`` to ``states``.

    Raises:
        RunError: ``max_steps`` is below that of the checkpoint, a file is gone or damaged, or the disk is
            full.
    """
    for adapter in config.adapters:
        name, steps = adapter.name, adapter.max_steps
        task, total = checkpoint["tasks"].get(name), checkpoint["total_steps"].get(name)
        if task is None or total is None or steps <= 0 or steps == total:
            continue
        if steps < total:
            raise RunError(
                f"adapters.{name}.max_steps: can only be raised once a run has begun; it was {total}, "
                f"got {steps}"
            )
        if task["state"] in ALIVE:
            continue
        if task["state"] != "finished" or task["step"] < total:
            why = f": {task['message']}" if task["message"] else ""
            reporter.warn(
                f"{name}: does not go on with the larger max_steps: it was {task['state']} at step "
                f"{task['step']}{why}"
            )
            continue
        if config.method == "full":
            raise RunError(
                f"{name}: method: full cannot be trained longer; begin a new run with base_model: "
                f"{folder.adapters / name}"
            )
        files = [folder.finished / file for file in checkpoint["decisions"].get("longer", {}).get(name, [])]
        try:
            if not files or name not in checkpoint["data"] or not all(file.is_file() for file in files):
                raise RunError(f"its optimizer's state is not in {folder.finished}")
            for file in files:
                check_tensors(file)
        except RunError as error:
            raise RunError(
                f"{name}: cannot be trained longer: {error}; begin a new task with init_from: "
                f"{folder.adapters / name}"
            ) from error
        with os_errors(f"{folder.states}: cannot be written"):
            folder.states.mkdir(exist_ok=True)
            for file in files:
                write_file(folder.states / file.name, file.read_bytes())
        reporter.note(f"{name}: goes on from step {task['step']} to step {steps}")
        task["state"], task["message"], task["saved"] = "running", "", {}
        checkpoint["decisions"]["admission"]["slots"].pop(name, None)
