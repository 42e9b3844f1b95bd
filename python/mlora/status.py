"""How far a run has come, read from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlora.checkpoint import list_checkpoints
from mlora.config_file import read_yaml
from mlora.errors import RunError
from mlora.result_table import result_table
from mlora.run_folder import RunFolder, is_running, read_metrics


def read_status(run_dir: Path | str) -> tuple[str, list[list[str]]]:
    """Read a run's state.

    Args:
        run_dir: the run's ``output_dir``.

    Returns:
        One line on the run, and the rows of its table, titles first.

    Raises:
        RunError: the folder holds no run, or a file in it cannot be read.
    """
    folder = RunFolder(Path(run_dir).resolve())
    if not folder.config.is_file():
        raise RunError(f"{folder.path}: holds no config.yaml, so there is no run")
    config = read_yaml(folder.config)
    summary = folder.read_summary() or {"status": "running", "adapters": {}}
    adapters = config.get("adapters")
    if not isinstance(adapters, list) or not all(isinstance(a, dict) and "name" in a for a in adapters):
        raise RunError(f"{folder.config}: has no list of adapters with names")
    for adapter in adapters:
        summary["adapters"].setdefault(adapter["name"], _unknown())
    for record in read_metrics(folder.metrics):
        _apply(summary["adapters"].setdefault(record["adapter"], _unknown()), record)
    if summary["status"] == "running" and not is_running(folder.metrics):
        summary["status"] = "interrupted"
    return _line(folder, summary["status"]), result_table(summary)


def _line(folder: RunFolder, status: str) -> str:
    if status == "running":
        return f"running: {folder.path}"
    if status in ("finished", "failed"):
        return f"{status}: {folder.path}"
    where = (
        "its last checkpoint"
        if list_checkpoints(folder.checkpoints)
        else "the start, for it has no checkpoint"
    )
    return f"not running; `mlora resume {folder.path}` continues from {where}"


def _unknown() -> dict[str, Any]:
    empty = {"before": None, "after": None}
    return {
        "state": "waiting",
        "step": 0,
        "max_steps": None,
        "loss": None,
        "eval_loss": dict(empty),
        "eval_exact_match": dict(empty),
    }


def _apply(entry: dict[str, Any], record: dict[str, Any]) -> None:
    if entry["state"] == "waiting":
        entry["state"] = "running"
    entry["step"] = max(entry["step"], record["step"])
    if "loss" in record:
        entry["loss"] = record["loss"]
    for key in ("eval_loss", "eval_exact_match"):
        if key in record:
            entry[key]["before" if record["step"] == 0 else "after"] = record[key]
