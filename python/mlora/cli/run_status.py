"""Reads how far a run has come from its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlora.cli.common import how_to_go_on
from mlora.cli.tables import result_table
from mlora.store.checkpoint import list_checkpoints
from mlora.store.queue import TaskQueue
from mlora.store.requests import ENDED, KnownTask, known_tasks
from mlora.store.run_folder import RunFolder, is_running, metrics_of
from mlora.store.stored_config import stored_adapter, stored_config
from mlora.sweep.ranking import SweepProgress, sweep_progress, trials_begun
from mlora.tasks.result import AdapterResult, evaluated_metrics, shown_metrics

MIB = 2**20
STEP_KEYS = (
    *("adapter", "step", "loss", "tokens", "learning_rate", "grad_norm", "seconds"),
    *("peak_memory_bytes", "skipped"),
)
"""The keys of a step's line in ``metrics.jsonl`` that are no metrics of the objective."""


@dataclass(frozen=True)
class RunStatus:
    """How far a run has come."""

    folder: RunFolder
    # ``running`` while a process is at work; ``finished``, ``failed``, ``paused``; else ``interrupted``
    status: str
    # as in ``summary.json``, with current states; ``unfinished`` if no process is at work
    adapters: dict[str, dict[str, Any]]
    tasks: dict[str, KnownTask]  # the same tasks, and what users asked of them
    memory: dict[str, int] | None  # in bytes, as the run has published it; None without a limit
    config: Mapping[str, Any]  # what `stored_config` returns
    fields: Mapping[str, Mapping[str, Any]]  # resolved, of each adapter, submitted task and trial
    sweep: SweepProgress | None = None
    seen: bool = True  # False: its file system has no locks, so a run that was killed counts as running

    @property
    def news(self) -> bool:
        """Whether users asked for something that the run has not taken yet."""
        return any(task.asked or task.state == "queued" for task in self.tasks.values())

    @property
    def line(self) -> str:
        """One line on the run and on how to continue it."""
        path = self.folder.path
        if self.status == "running":
            doubt = "" if self.seen else ", or was killed: its file system has no locks that would tell"
            return f"running: {path}{doubt}"
        if self.status in ("finished", "failed", "paused"):
            if self.news:
                return f"{self.status}: {path}; new requests wait; `mlora resume {path}` takes them"
            more = f"; continue with {how_to_go_on(path, self.paused)}" if self.status == "paused" else ""
            return f"{self.status}: {path}{more}"
        saved = list_checkpoints(self.folder.checkpoints)
        where = "its last checkpoint" if saved else "the start: it has no checkpoint"
        return f"not running; `mlora resume {path}` continues from {where}"

    @property
    def paused(self) -> list[str]:
        """Names of the tasks that are paused."""
        return [name for name, task in self.tasks.items() if task.state == "paused"]

    def notes(self) -> Iterator[str]:
        """Yields the lines below the table: the sweep, memory, and why tasks were refused or stopped."""
        if self.sweep:
            yield self.sweep.line
        if self.memory:
            size = {key: f"{value / MIB:.0f} MiB" for key, value in self.memory.items()}
            peak = f"measured peak {size['peak_bytes']}" if self.memory["peak_bytes"] else "not yet measured"
            yield (
                f"memory: limit {size['limit_bytes']}, base {size['base_bytes']}, "
                f"reserve {size['reserved_bytes']}, "
                f"predicted {size['predicted_bytes']}, {peak}"
            )
        for name, entry in self.adapters.items():
            if entry["state"] in ("refused", "stopped") and entry.get("message"):
                yield f"{name}: {entry['state']}: {entry['message']}"

    def table(self) -> list[list[str]]:
        """Returns the rows of the table, titles first."""
        tasks = list(self.tasks.values())
        ranked = any(task.priority for task in tasks)
        more = {
            "asked for": [", ".join(task.asked) for task in tasks],
            "latest eval loss": [_latest(self.adapters[task.name]) for task in tasks],
            **_latest_metrics([self.adapters[task.name] for task in tasks]),
            "priority": [str(task.priority) if ranked else "" for task in tasks],
            "states": [_size(task, "states_bytes") for task in tasks],
            "micro-batch": [_size(task, "batch_bytes") for task in tasks],
        }
        adapters = {
            name: entry if entry["state"] in ENDED else _without_after(entry)
            for name, entry in self.adapters.items()
        }
        return result_table({"status": self.status, "adapters": adapters}, more)

    def as_json(self) -> dict[str, Any]:
        """Returns the status for scripts, as plain values."""
        tasks = []
        for name, task in self.tasks.items():
            predicted = {key: task.view.get(key) for key in ("states_bytes", "batch_bytes")}
            own = {"name": name, "latest_eval": None, **self.adapters[name]}
            own |= {"priority": task.priority, "asked": task.asked}
            tasks.append({**own, "predicted": predicted if self.memory and any(predicted.values()) else None})
        return {
            "run_dir": str(self.folder.path),
            "status": self.status,
            "at_work": self.status == "running",
            "news": self.news,
            "memory": self.memory,
            "sweep": self.sweep.as_json() if self.sweep else None,
            "tasks": tasks,
        }


def read_status(run_dir: Path | str) -> RunStatus:
    """Reads a run's status. Raises RunError if the folder holds no run or a file cannot be read."""
    folder = RunFolder(Path(run_dir).resolve())
    folder.check_is_run()
    values = stored_config(folder)
    own = [(adapter["name"], adapter.get("priority") or 0) for adapter in values["adapters"]]
    at_work = is_running(folder.metrics)  # before the summary is read: the run may end in between
    summary = folder.read_summary() or {"status": "running", "adapters": {}}
    with ExitStack() as stack:
        queue = stack.enter_context(TaskQueue(folder.queue)) if folder.queue.is_file() else None
        tasks = known_tasks(own, summary, queue)
        memory = queue.views()[1].get("memory") if queue else None
        fields = _fields(values, queue)
    adapters = {name: summary["adapters"].get(name) or _no_result(task) for name, task in tasks.items()}
    for record in metrics_of(folder.metrics):
        name = record["adapter"]
        if name not in tasks:
            tasks[name] = KnownTask(name, 0)
            adapters[name] = _no_result(tasks[name])
        _apply(adapters[name], record)
    status = summary["status"]
    if at_work is not None and (status == "running" or at_work):
        status = "running" if at_work else "interrupted"
    for name, task in tasks.items():
        stands = task.state in ("running", "waiting") and status != "running"
        adapters[name]["state"] = "unfinished" if stands else task.state
    sweep = folder.read_config().sweep if values.get("sweep") else None
    progress = sweep_progress(folder, sweep) if sweep else None
    return RunStatus(folder, status, adapters, tasks, memory, values, fields, progress, at_work is not None)


def _fields(config: Mapping[str, Any], queue: TaskQueue | None) -> dict[str, Mapping[str, Any]]:
    """Returns the fields of the config's adapters, of submitted tasks and of trials, by name."""
    came: dict[str, Mapping[str, Any]] = {}
    if queue:
        came |= {r.task: r.content.get("adapter", {}) for r in queue.requests() if r.kind == "submit"}
        came |= {name: content.get("adapter", {}) for name, content in trials_begun(queue)}
        came = {name: stored_adapter(name, fields) for name, fields in came.items()}
    return came | {adapter["name"]: adapter for adapter in config["adapters"]}


def _size(task: KnownTask, key: str) -> str:
    size = task.view.get(key)
    return f"{size / MIB:.1f} MiB" if size and task.state in ("running", "waiting", "paused") else ""


def _latest(entry: dict[str, Any]) -> str:
    """Returns the latest evaluation of a task that has not ended; the one of step 0 has its own column."""
    found = _latest_eval(entry)
    return f"{found['eval_loss']:.4f}, step {found['step']}" if found else ""


def _latest_eval(entry: dict[str, Any]) -> dict[str, Any]:
    found = entry.get("latest_eval") or {}
    return found if found.get("step") and entry["state"] not in ENDED else {}


def _latest_metrics(entries: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Returns a column for each metric that the latest evaluations measured, by title."""
    rows = [_latest_eval(entry) for entry in entries]
    cells = [shown_metrics(evaluated_metrics(row)) for row in rows]
    for row, own in zip(rows, cells, strict=True):
        if "eval_exact_match" in row:
            own["exact match"] = f"{row['eval_exact_match']:.1%}"
    titles = dict.fromkeys(title for own in cells for title in own)
    return {f"latest eval {title}": [own.get(title, "") for own in cells] for title in titles}


def _without_after(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns a task that has not ended without values "after", which have columns of their own."""
    pairs = ("eval_loss", "eval_accuracy", "eval_exact_match")
    return {
        **entry,
        **{key: {**entry[key], "after": None} for key in pairs if key in entry},
        "eval_metrics": {
            name: {**pair, "after": None} for name, pair in entry.get("eval_metrics", {}).items()
        },
    }


def _no_result(task: KnownTask) -> dict[str, Any]:
    return asdict(AdapterResult(task.state, max_steps=task.max_steps))


def _apply(entry: dict[str, Any], record: dict[str, Any]) -> None:
    entry["step"] = max(entry["step"], record["step"])
    if "loss" in record:
        entry["loss"] = record["loss"]
        entry["metrics"] = {key: value for key, value in record.items() if key not in STEP_KEYS}
    measured = {key: record[key] for key in record if key.startswith("eval_") and key != "eval_tokens"}
    if measured:
        entry["latest_eval"] = {"step": record["step"], **measured}
    if entry["state"] in ENDED:  # the summary knows what was saved, and what comes after it
        return
    for key, value in measured.items():
        name, nothing = key.removeprefix("eval_"), {"before": None, "after": None}
        pair = entry[key] if key in entry else entry["eval_metrics"].setdefault(name, nothing)
        pair["before" if record["step"] == 0 else "after"] = value
    if "best" in record:
        metric = record["best"]
        entry["best"] = {"step": record["step"], "metric": metric, "value": record[metric]}
