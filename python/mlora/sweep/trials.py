"""The trials of a sweep in its run: their tasks, and what the sweep asks of the run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mlora.config.run_config import RunConfig
from mlora.config.search_space import with_params
from mlora.config.training_fields import inherited
from mlora.sweep.ranking import Proposal, param_text
from mlora.sweep.study import Study, check_arguments
from mlora.tasks.task import Task


class Sweep:
    """Keeps a sweep's `places` filled with trials.

    At an iteration boundary it first judges its trials' results, then makes proposals. A resumed run judges
    at the same boundaries, and takes the proposals from its journal. Raises RunError if Optuna refuses the
    config.
    """

    def __init__(self, config: RunConfig) -> None:
        assert config.sweep is not None
        self._sweep, self._seed, self._count = config.sweep, config.seed, config.sweep.count
        own = {**config.sweep.adapter, **config.sweep.search}
        self._fields = {**inherited(config.defaults.model_dump(), own), **config.sweep.adapter}
        if self._fields["seed"] is None:
            self._fields["seed"] = config.seed
        self._pruning = config.sweep.pruner_arguments(config.defaults.model_dump())
        check_arguments(config.sweep, self._pruning)
        self._study = Study(config.sweep, config.seed, self._pruning)
        self._judged: dict[str, int] = {}
        self._open: dict[str, Task] = {}

    @property
    def left(self) -> int:
        """The number of trials still to begin."""
        return max(0, self._count - len(self._study))  # the config may now want fewer than have begun

    def due(self) -> bool:
        """Whether there is something to judge or room for a trial; takes microseconds."""
        if self.left and len(self._open) < self._sweep.places:
            return True
        prunes = self._sweep.pruner != "none"
        return any(
            not task.alive or (prunes and self._new(task, task.progress.evaluations[-1:]))
            for task in self._open.values()
        )

    def _new(self, task: Task, evaluations: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns those of a trial's evaluations that were not judged yet."""
        return [entry for entry in evaluations if entry["step"] > self._judged[task.name]]

    def ended(self) -> bool:
        """Whether a trial has ended since the last `judge`."""
        return any(not task.alive for task in self._open.values())

    def begun(self, trial: Mapping[str, Any], task: Task | None) -> str:
        """Notes a trial that the run has taken (`task=None`: refused); returns a line with its values."""
        self._study.begin(trial)
        if task is None:
            self._study.end(trial["number"], "fail")
        else:
            self._open[task.name], self._judged[task.name] = task, 0
        values = {path: self._sweep.space[path].value(param) for path, param in trial["params"].items()}
        return ", ".join(f"{path} {param_text(value)}" for path, value in values.items())

    def taken_off(self, name: str, *, pruned: bool = False) -> None:
        """Notes that a trial no longer trains: refused, cancelled or pruned; ignores other tasks."""
        if name in self._open:
            self._study.end(_number(name), "pruned" if pruned else "fail")
            del self._open[name], self._judged[name]

    def judge(self) -> list[str]:
        """Reports new results to Optuna; returns the names of trials to prune."""
        behind = []
        for name, task in list(self._open.items()):
            number, new = _number(name), self._new(task, task.progress.evaluations)
            late = [self._study.report(number, entry["step"], entry["eval_loss"]) for entry in new]
            if not task.alive:
                finished = task.progress.state == "finished"
                value = task.evaluation(task.saved_step).get(self._sweep.metric) if finished else None
                if value is not None and math.isfinite(value):
                    self._study.end(number, "complete", value)
                else:
                    self._study.end(number, "fail")
                del self._open[name], self._judged[name]
            elif new:
                self._judged[name] = new[-1]["step"]
                if any(late):
                    behind.append(name)
        return behind

    def proposals(self, behind: list[str]) -> Iterator[Proposal]:
        """Yields what the sweep asks of its run; each is carried out before the next.

        `behind` is what `judge` returned.
        """
        for name in behind:
            if name in self._open:  # it was not cancelled meanwhile
                yield Proposal(name, None)
        while self.left and len(self._open) < self._sweep.places:
            trial = self._study.propose()
            name = self._sweep.trial_name(trial["number"])
            adapter = with_params(self._fields, self._sweep.space, trial["params"]) | {"name": name}
            yield Proposal(name, {"adapter": adapter, "datasets": [], "trial": trial})

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint holds, as plain values."""
        return {"trials": self._study.state(), "judged": dict(self._judged)}

    def load_state(self, state: Mapping[str, Any], tasks: Iterable[Task]) -> None:
        """Goes on from a checkpoint."""
        self._study = Study(self._sweep, self._seed, self._pruning, state["trials"])
        self._judged = dict(state["judged"])
        self._open = {task.name: task for task in tasks if task.name in self._judged}


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
