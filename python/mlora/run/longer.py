"""Training that goes on beyond its last step, because ``max_steps`` was raised at a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlora.config.run_config import RunConfig
from mlora.errors import RunError
from mlora.run.reporter import Reporter
from mlora.store.disk import check_tensors, os_errors, write_file
from mlora.store.run_folder import RunFolder
from mlora.tasks.task import ALIVE


def raised_in(config: RunConfig, summary: Mapping[str, Any]) -> list[str]:
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
