"""The results of a run and of its adapters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mlora.tasks.task import Task

Status = Literal["running", "finished", "failed", "paused", "interrupted"]
Pair = dict[Literal["before", "after"], float | None]
SHOWN = {
    "accuracy": ("accuracy", ".1%"),
    "rewards/accuracies": ("reward accuracy", ".1%"),
    "rewards/margins": ("reward margin", ".4f"),
}
"""The metrics of built-in objectives that tables and lines show: their titles, and how a value is written."""
_OWN_FIELDS = ("eval_loss", "eval_accuracy", "eval_exact_match")


@dataclass(frozen=True)
class AdapterResult:
    """The result of one adapter.

    Args:
        state: as `mlora.tasks.task.Progress`, or ``refused``.
        message: why it was stopped, pruned or refused, or that it stopped early; else empty.
        step: optimizer steps made.
        max_steps: optimizer steps to make; None if it was refused.
        loss: mean training loss of the last step.
        tokens: trained tokens.
        seconds: wall time from its first to its last step.
        eval_loss: ``before`` the first step and ``after`` the last one, or, if the adapter was saved with the
            weights of its best evaluation, after that one. None if it was not evaluated then.
        eval_accuracy: the same for a classifier's share of right labels.
        eval_exact_match: the same for the share of prompts completed exactly.
        metrics: means of its objective's metrics in the last step, by name.
        eval_metrics: ``before`` and ``after`` of these metrics, but for ``accuracy``, by name.
        best: its best evaluation after a step: ``step``, ``metric`` and ``value``. None if no field of its
            config asks for one.
        saved_step: the step whose weights were saved; None if none were.
    """

    state: str
    message: str = ""
    step: int = 0
    max_steps: int | None = None
    loss: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    eval_loss: Pair = field(default_factory=lambda: {"before": None, "after": None})
    eval_accuracy: Pair = field(default_factory=lambda: {"before": None, "after": None})
    eval_exact_match: Pair = field(default_factory=lambda: {"before": None, "after": None})
    metrics: dict[str, float] = field(default_factory=dict)
    eval_metrics: dict[str, Pair] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    saved_step: int | None = None


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Args:
        status: ``finished`` if every adapter was trained. ``failed`` if one was refused or stopped; for a
            sweep's trials, only if none finished. ``paused`` if only paused tasks remain. ``interrupted`` if
            the run ended with a checkpoint before every adapter was trained: a signal came, or this process
            has no room for those that are left. `mlora.run.run.resume` continues a paused or interrupted run.
        output_dir: its folder.
        seconds: wall time, all parts of a resumed run together.
        adapters: the results by name, in the order of the config.
        signal: the signal that interrupted it; None if there was none.
    """

    status: Status
    output_dir: Path
    seconds: float
    adapters: Mapping[str, AdapterResult]
    signal: int | None = None

    @property
    def exit_code(self) -> int:
        """0 if finished or paused, 128 + the signal if one interrupted it, else 1."""
        if self.status == "interrupted" and self.signal is not None:
            return 128 + self.signal
        return 0 if self.status in ("finished", "paused") else 1

    def summary(self) -> dict[str, Any]:
        """Returns the content of ``summary.json``."""
        adapters = {name: asdict(adapter) for name, adapter in self.adapters.items()}
        return {"status": self.status, "seconds": round(self.seconds, 3), "adapters": adapters}


def adapter_result(task: Task) -> AdapterResult:
    """Returns a task's result so far."""
    progress, rule = task.progress, task.config.best_rule
    saved = {"finished": task.saved_step, "stopped": task.kept_step}.get(progress.state)
    last = progress.step if saved is None else saved
    return AdapterResult(
        state=progress.state,
        message=progress.message,
        step=progress.step,
        max_steps=task.total_steps,
        loss=progress.loss,
        tokens=progress.tokens,
        seconds=round(progress.seconds, 3),
        eval_loss=_pair(task, "eval_loss", last),
        eval_accuracy=_pair(task, "eval_accuracy", last),
        eval_exact_match=_pair(task, "eval_exact_match", last),
        metrics=progress.metrics,
        eval_metrics={name: _pair(task, f"eval_{name}", last) for name in _own_metrics(task)},
        best={"step": progress.best_step, "metric": rule.metric, "value": progress.best}
        if rule and progress.best_step is not None
        else None,
        saved_step=saved,
    )


def columns_of(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns which of these metrics tables and lines show, with title and form: `SHOWN`, then own losses'.

    Other metrics of built-in objectives are in ``metrics.jsonl`` only.
    """
    from mlora.objectives.registry import built_in_metrics  # imports pydantic, which `--version` needs not

    given, built_in = list(names), built_in_metrics()
    own = {name: (name, ".4g") for name in given if name not in SHOWN and name not in built_in}
    return {name: column for name, column in SHOWN.items() if name in given} | own


def shown_metrics(metrics: Mapping[str, float]) -> dict[str, str]:
    """Returns the metrics of `columns_of`, as text by title."""
    return {title: format(metrics[name], form) for name, (title, form) in columns_of(metrics).items()}


def evaluated_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the objective's metrics in the line of an evaluation, without ``eval_``."""
    others = ("eval_loss", "eval_exact_match", "eval_tokens")
    return {
        key.removeprefix("eval_"): value
        for key, value in record.items()
        if key.startswith("eval_") and key not in others
    }


def _own_metrics(task: Task) -> list[str]:
    """Returns the names of the objective's metrics in evaluations that have no field of their own."""
    keys = dict.fromkeys(key for entry in task.progress.evaluations for key in entry)
    return [key.removeprefix("eval_") for key in keys if key not in (*_OWN_FIELDS, "step")]


def _pair(task: Task, key: str, last: int) -> Pair:
    found: Pair = {
        "before": task.evaluation(0).get(key),
        "after": task.evaluation(last).get(key) if last else None,
    }
    return {when: value if value is None or math.isfinite(value) else None for when, value in found.items()}
