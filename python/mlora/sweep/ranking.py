"""A sweep's trials in the files of its run: what has begun, what came of it, how far the sweep has come."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlora.config.sweep_config import SweepConfig
from mlora.store.queue import TaskQueue
from mlora.store.run_folder import RunFolder, read_metrics


@dataclass(frozen=True)
class Proposal:
    """A trial to begin or to prune; part of the journal's entries."""

    task: str  # its name
    # what a submission would hold, and what Optuna keeps of the trial; None = prune it
    trial: Mapping[str, Any] | None


def trials_begun(queue: TaskQueue, until: int | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields name and content of each trial that a run began, by its journal up to iteration `until`."""
    for iteration, entry in queue.entries().items():
        if until is None or iteration <= until:
            for proposal in entry.get("proposals", ()):
                if proposal["trial"] is not None:
                    yield proposal["task"], proposal["trial"]


@dataclass(frozen=True)
class RankedTrial:
    """A trial and its results."""

    rank: int | None  # from 1 among finished trials; None for others
    name: str
    state: str
    step: int  # optimizer steps made
    # the sweep's metric of the saved adapter. If that is ``eval_loss``, the last one measured of a trial that
    # has not finished.
    value: float | None
    loss: float | None  # its ``eval_loss`` likewise
    seconds: float  # wall time in training
    params: Mapping[str, Any]  # values of the search space by their paths
    curve: Sequence[tuple[int, float]]  # steps, and ``eval_loss`` after them

    def metrics(self, sweep: SweepConfig) -> list[float | None]:
        """Returns the values of `shown_metrics`; None where there is none."""
        return [self.value, self.loss][: len(shown_metrics(sweep))]


def shown_metrics(sweep: SweepConfig) -> list[str]:
    """Returns the metrics that tables show: the sweep's, and the loss."""
    return list(dict.fromkeys([sweep.metric, "eval_loss"]))


def rank_trials(folder: RunFolder, sweep: SweepConfig) -> list[RankedTrial]:
    """Ranks a sweep's trials: the finished ones, best first; then the others, furthest first."""
    summary = folder.read_summary() or {"status": "running", "adapters": {}}
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for record in read_metrics(folder.metrics):
        if "eval_loss" in record:
            curves[record["adapter"]].append((record["step"], record["eval_loss"]))
    finished: list[RankedTrial] = []
    others: list[RankedTrial] = []
    for name, params in _params(folder, sweep).items():
        entry, curve = summary["adapters"].get(name), curves[name]
        if entry is None:
            continue
        state = entry["state"]
        after = {key: _after(entry, key) if state == "finished" else None for key in shown_metrics(sweep)}
        if after["eval_loss"] is None and curve and state != "finished":
            after["eval_loss"] = curve[-1][1]
        if state == "running" and summary["status"] != "running":
            state = "unfinished"
        value, loss = after[sweep.metric], after["eval_loss"]
        trial = RankedTrial(None, name, state, entry["step"], value, loss, entry["seconds"], params, curve)
        (finished if state == "finished" and value is not None else others).append(trial)
    sign = -1 if sweep.greater else 1
    finished.sort(key=lambda trial: sign * (trial.value or 0.0))
    others.sort(key=lambda trial: -trial.step)
    return [*(replace(trial, rank=rank) for rank, trial in enumerate(finished, 1)), *others]


def _after(entry: Mapping[str, Any], key: str) -> float | None:
    """Returns what an adapter's last evaluation measured, from its entry in ``summary.json``."""
    pair = entry.get(key) or entry.get("eval_metrics", {}).get(key.removeprefix("eval_"), {})
    found: float | None = pair.get("after")
    return found


def _params(folder: RunFolder, sweep: SweepConfig) -> dict[str, dict[str, Any]]:
    """Returns the values of each trial that has begun, by its name."""
    space = sweep.space
    if not folder.queue.is_file():
        return {}
    with TaskQueue(folder.queue) as queue:
        begun = {name: content["trial"]["params"] for name, content in trials_begun(queue)}
    return {
        name: {path: space[path].value(param) for path, param in params.items() if path in space}
        for name, params in begun.items()
    }


def ranked_table(trials: Sequence[RankedTrial], sweep: SweepConfig) -> list[list[str]]:
    """Returns the rows of a sweep's table, titles first; ``=`` marks ranks of trials with equal values."""
    values = Counter(trial.value for trial in trials if trial.rank)
    rows = [["rank", "trial", "state", "step", *shown_metrics(sweep), *sweep.space]]
    for trial in trials:
        numbers = ["" if value is None else f"{value:.4f}" for value in trial.metrics(sweep)]
        params = [param_text(trial.params.get(path)) for path in sweep.space]
        rank = f"{trial.rank}{' =' * (values[trial.value] > 1)}" if trial.rank else ""
        rows.append([rank, trial.name, trial.state, str(trial.step), *numbers, *params])
    return rows


def param_text(value: Any) -> str:
    """Returns a value of a search space as text: numbers in short, lists as JSON."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class SweepProgress:
    """How far a sweep has come."""

    begun: int  # trials that have begun
    count: int  # trials that there will be
    metric: str
    best: RankedTrial | None  # the best of those that have finished; None before there is one

    @property
    def line(self) -> str:
        """One line for the user."""
        found = f"sweep: {self.begun} of {self.count} trials started"
        if self.best is None:
            return f"{found}, none finished yet"
        params = ", ".join(f"{path} {param_text(value)}" for path, value in self.best.params.items())
        return f"{found}; best so far {self.best.name}, {self.metric} {self.best.value:.4g}: {params}"

    def as_json(self) -> dict[str, Any]:
        """Returns the same for scripts, as plain values."""
        best, metric = self.best, self.metric
        found = best and {"trial": best.name, metric: best.value, "params": dict(best.params)}
        return {"begun": self.begun, "trials": self.count, "best": found}


def sweep_progress(folder: RunFolder, sweep: SweepConfig) -> SweepProgress:
    """Reads how far a sweep has come."""
    trials = rank_trials(folder, sweep)
    best = trials[0] if trials and trials[0].rank == 1 else None
    return SweepProgress(len(trials), max(sweep.count, len(trials)), sweep.metric, best)
