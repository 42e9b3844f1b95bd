"""The results of a sweep's trials, from the files of its run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlora.config.best_rule import METRICS
from mlora.config.sweep_config import SweepConfig
from mlora.files.run_folder import RunFolder, read_metrics
from mlora.queue.task_queue import TaskQueue
from mlora.sweep.proposal import trials_begun


@dataclass(frozen=True)
class RankedTrial:
    """A trial and its results.

    Attributes:
        rank: from 1 among finished trials; None for others.
        step: optimizer steps made.
        value: the sweep's metric of the saved adapter. If that is ``eval_loss``, the last one measured of a
            trial that has not finished.
        loss: its ``eval_loss`` likewise.
        seconds: wall time in training.
        params: values of the search space by their paths.
        curve: steps, and ``eval_loss`` after them.
        message: why it was refused, stopped or pruned.
    """

    rank: int | None
    name: str
    state: str
    step: int
    value: float | None
    loss: float | None
    seconds: float
    params: Mapping[str, Any]
    curve: Sequence[tuple[int, float]]
    message: str

    def metrics(self, sweep: SweepConfig) -> list[float | None]:
        """Returns the values of `shown_metrics`; None where there is none."""
        return [self.value, self.loss][: len(shown_metrics(sweep))]


def shown_metrics(sweep: SweepConfig) -> list[str]:
    """Returns the metrics that tables show: the sweep's, and the loss."""
    return list(dict.fromkeys([sweep.metric, "eval_loss"]))


def rank_trials(folder: RunFolder, sweep: SweepConfig) -> list[RankedTrial]:
    """Ranks a sweep's trials: the finished ones, best first; then the others, furthest first."""
    summary = folder.read_summary() or {"status": "running", "adapters": {}}
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in read_metrics(folder.metrics):
        if "eval_loss" in record:
            curves.setdefault(record["adapter"], []).append((record["step"], record["eval_loss"]))
    trials = []
    for name, params in _params(folder, sweep).items():
        entry = summary["adapters"].get(name)
        if entry is not None:
            stands = entry["state"] == "running" and summary["status"] != "running"
            entry = {**entry, "state": "unfinished"} if stands else entry
            trials.append(_trial(name, params, entry, curves.get(name, []), sweep.metric))
    sign = 1 if sweep.metric == "eval_loss" else -1
    finished = [trial for trial in trials if trial.state == "finished" and trial.value is not None]
    finished.sort(key=lambda trial: sign * (trial.value or 0.0))
    places = {trial.name: place for place, trial in enumerate(finished, 1)}
    others = sorted((trial for trial in trials if trial.name not in places), key=lambda trial: -trial.step)
    return [RankedTrial(**{**vars(trial), "rank": places.get(trial.name)}) for trial in [*finished, *others]]


def _params(folder: RunFolder, sweep: SweepConfig) -> dict[str, dict[str, Any]]:
    """Returns each begun trial's values by its name."""
    space = sweep.space
    if not folder.queue.is_file():
        return {}
    with TaskQueue(folder.queue) as queue:
        begun = {name: content["trial"]["params"] for name, content in trials_begun(queue)}
    return {
        name: {path: space[path].value(param) for path, param in params.items() if path in space}
        for name, params in begun.items()
    }


def _trial(
    name: str,
    params: Mapping[str, Any],
    entry: Mapping[str, Any],
    curve: Sequence[tuple[int, float]],
    metric: str,
) -> RankedTrial:
    after = {key: entry[key]["after"] if entry["state"] == "finished" else None for key in METRICS}
    if after["eval_loss"] is None and curve:
        after["eval_loss"] = curve[-1][1]
    return RankedTrial(
        None,
        name,
        entry["state"],
        entry["step"],
        after[metric],
        after["eval_loss"],
        entry["seconds"],
        params,
        curve,
        entry["message"],
    )


def ranked_table(trials: Sequence[RankedTrial], sweep: SweepConfig) -> list[list[str]]:
    """Returns the rows of a sweep's table, titles first."""
    rows = [["rank", "trial", "state", "step", *shown_metrics(sweep), *sweep.space]]
    for trial in trials:
        numbers = ["" if value is None else f"{value:.4f}" for value in trial.metrics(sweep)]
        values = [shown(trial.params.get(path)) for path in sweep.space]
        rows.append([str(trial.rank or ""), trial.name, trial.state, str(trial.step), *numbers, *values])
    return rows


def shown(value: Any) -> str:
    """Returns a value of a search space as text: numbers in short, lists as JSON."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
