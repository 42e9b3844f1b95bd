"""Reports what a run does: not at all, or as plain lines. `mlora.cli.live_table` draws a table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from mlora.errors import visible
from mlora.tasks.result import evaluated_metrics, shown_metrics
from mlora.tasks.task import Task
from mlora_ext.adapters.trained_parts import labels_of, task_of


class Reporter:
    """Receives the events of a run, and ignores them."""

    def start(self, tasks: Sequence[Task]) -> None:
        """The run starts or continues with these tasks, in the order of its config."""

    def step(self, task: Task, record: dict[str, Any]) -> None:
        """A task made an optimizer step; ``record`` is its line of ``metrics.jsonl``."""

    def logged(self, task: Task, record: dict[str, Any]) -> None:
        """The step just told is one to log: every ``logging_steps``, the last, or as a callback asked."""

    def evaluation(self, task: Task, record: dict[str, Any]) -> None:
        """A task was evaluated; ``record`` is its line of ``metrics.jsonl``."""

    def joined(self, task: Task, tasks: Sequence[Task]) -> None:
        """A task was added to the run at work; ``tasks`` are all tasks now."""

    def changed(self, task: Task) -> None:
        """A task ended, was paused or was unpaused."""

    def waits(self, names: Sequence[str], went_on: Sequence[str]) -> None:
        """The tasks that wait for memory changed: ``names`` wait now, ``went_on`` have been admitted."""

    def note(self, line: str) -> None:
        """A line of information."""

    def warn(self, line: str) -> None:
        """A line on something that is probably a mistake."""

    def fault(self, line: str) -> None:
        """A line on a fault that makes the run's exit code non-zero."""

    def close(self) -> None:
        """No more events follow."""


class Reporters(Reporter):
    """Passes what adapters do to several reporters in turn; all else goes to the first only."""

    def __init__(self, lines: Reporter, *others: Reporter) -> None:
        self._lines, self._all = lines, (lines, *others)

    def start(self, tasks: Sequence[Task]) -> None:
        self._lines.start(tasks)

    def joined(self, task: Task, tasks: Sequence[Task]) -> None:
        self._lines.joined(task, tasks)

    def waits(self, names: Sequence[str], went_on: Sequence[str]) -> None:
        self._lines.waits(names, went_on)

    def note(self, line: str) -> None:
        self._lines.note(line)

    def warn(self, line: str) -> None:
        self._lines.warn(line)

    def fault(self, line: str) -> None:
        self._lines.fault(line)

    def step(self, task: Task, record: dict[str, Any]) -> None:
        for each in self._all:
            each.step(task, record)

    def logged(self, task: Task, record: dict[str, Any]) -> None:
        for each in self._all:
            each.logged(task, record)

    def evaluation(self, task: Task, record: dict[str, Any]) -> None:
        for each in self._all:
            each.evaluation(task, record)

    def changed(self, task: Task) -> None:
        for each in self._all:
            each.changed(task)

    def close(self) -> None:
        """Closes the one of the lines last: others may have something to say."""
        for each in reversed(self._all):
            each.close()


def epoch_of(task: Task) -> float:
    """Returns how many times a task has passed its data, counted in micro-batches as ``Trainer`` does."""
    return task.progress.batches / max(1, task.plan.batches_per_epoch)


def logs_of(task: Task, record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a task's line of ``metrics.jsonl`` as ``Trainer`` logs them, and ``epoch``."""
    numbers = {
        key: value
        for key, value in record.items()
        if key not in ("adapter", "step") and type(value) in (int, float)
    }
    return {**numbers, "epoch": epoch_of(task)}


class Pace:
    """Tokens per second and time left of each task, smoothed over its last steps.

    The time left is the run's seconds for each trained token, times the tokens that all tasks train until
    then: once others have ended, steps are faster. First steps warm up; they count only while there are no
    later ones.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._tokens: dict[str, float] = {}
        self._all = 0  # trained tokens of all tasks
        self._all_at: dict[str, int] = {}  # the same at each task's last step
        self._recent_seconds, self._recent_tokens = 0.0, 0.0

    def add(self, name: str, tokens: int, seconds: float) -> None:
        """Counts a step: its trained tokens and its wall time."""
        old = self._seconds.get(name)
        self._seconds[name] = seconds if old is None else 0.9 * old + 0.1 * seconds
        self._tokens[name] = tokens if old is None else 0.9 * self._tokens[name] + 0.1 * tokens
        self._all += tokens
        if name in self._all_at:
            self._recent_seconds = 0.98 * self._recent_seconds + seconds
            self._recent_tokens = 0.98 * self._recent_tokens + self._all - self._all_at[name]
        self._all_at[name] = self._all

    def tokens_per_second(self, name: str) -> float | None:
        """Returns a task's trained tokens per second, or None before its first step."""
        seconds = self._seconds.get(name)
        return self._tokens[name] / seconds if seconds else None

    def left(self, task: Task, tasks: Sequence[Task]) -> str:
        """Returns the time until a task's last step, such as ``1:05``; empty before its first step.

        `tasks` are all of the run.
        """
        seconds = self._seconds.get(task.name)
        if seconds is None:
            return ""
        if not self._recent_tokens:
            return clock(seconds * (task.total_steps - task.progress.step))
        beside = [
            other for other in tasks if other.progress.state == "running" and other.name in self._tokens
        ]
        tokens = 0.0
        for other in beside:
            batches = min(_batches_left(task), _batches_left(other))
            tokens += self._tokens[other.name] / _batches_per_step(other) * batches
        return clock(tokens * self._recent_seconds / self._recent_tokens)


def _batches_per_step(task: Task) -> float:
    """Returns the micro-batches of a task's optimizer steps so far, on average."""
    return max(1.0, task.progress.batches / max(1, task.progress.step))


def _batches_left(task: Task) -> float:
    return _batches_per_step(task) * (task.total_steps - task.progress.step)


def clock(seconds: float) -> str:
    """Returns seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _metrics_of(metrics: Mapping[str, float]) -> str:
    """Returns the metrics that lines show, each with a space behind it."""
    return "".join(f"{title} {value} " for title, value in shown_metrics(metrics).items())


def some(names: Sequence[str], most: int = 6) -> str:
    """Joins the first `most` names with commas and says how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def labels_told(task: Task, longest: int = 24) -> str:
    """Returns how many labels a task's head predicts, and their names; empty if it predicts none."""
    known = {} if task.lora is None else labels_of(task.lora)
    count = known.get("num_labels")
    if not count or task.lora is None or task_of(task.lora) == "QUESTION_ANS":
        return ""  # an answer's two are no labels
    if known.get("problem_type") == "regression":
        return "a number" if count == 1 else f"{count} numbers"
    names = [name if name.isprintable() else repr(name) for name in known.get("label_names", ())]
    shown = [name if len(name) <= longest else f"{name[: longest - 1]}…" for name in names]
    return f"{count} labels" + (f" ({some(shown)})" if shown else "")


def _held_out(task: Task) -> int:
    """Returns how many samples of its dataset `validation_split` holds out for a task."""
    data = task.eval_data
    if data is None or data is task.data or task.config.eval_dataset != task.config.dataset:
        return 0
    return len(data.samples)


class PlainLines(Reporter):
    """Prints one line for each event, warnings and faults to `err`; steps every ``logging_steps``."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._pace = Pace()
        self._waiting: Sequence[str] = ()
        self._tasks: Sequence[Task] = ()

    def start(self, tasks: Sequence[Task]) -> None:
        """Prints how many samples and steps each task has, and the labels of its head."""
        self._tasks = tasks
        self._introduce(tasks)

    def _introduce(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            if task.progress.state == "running":
                done = f" from step {task.progress.step}" if task.progress.step else ""
                labels = labels_told(task)
                more = f", {labels}" if labels else ""
                held = f", {_held_out(task)} held out" if _held_out(task) else ""
                samples = f"{len(task.data.samples)} samples{held}"
                self.note(f"{task.name}: {samples}, {task.total_steps} steps{done}{more}")

    def step(self, task: Task, record: dict[str, Any]) -> None:
        self._pace.add(task.name, record["tokens"], record["seconds"])
        interval = task.every(task.config.logging_steps)
        if interval and record["step"] % interval == 0:
            speed = self._pace.tokens_per_second(task.name) or 0.0
            metrics = _metrics_of(task.progress.metrics)
            self.note(
                f"{task.name}: step {record['step']}/{task.total_steps} loss {record['loss']:.4f} "
                f"{metrics}learning_rate {record['learning_rate']:.3g} {speed:.0f} tokens/s "
                f"ETA {self._pace.left(task, self._tasks)}"
            )

    def evaluation(self, task: Task, record: dict[str, Any]) -> None:
        exact = record.get("eval_exact_match")
        more = "" if exact is None else f"exact match {exact:.1%}"
        more = f"eval_loss {record['eval_loss']:.4f} {_metrics_of(evaluated_metrics(record))}{more}".rstrip()
        self.note(
            f"{task.name}: step {record['step']}/{task.total_steps} {more}"
            f"{', the best so far' if 'best' in record else ''}"
        )

    def joined(self, task: Task, tasks: Sequence[Task]) -> None:
        """Prints how many samples and steps the new task has."""
        self._tasks = tasks
        self._introduce([task])

    def changed(self, task: Task) -> None:
        progress = task.progress
        if progress.state == "stopped":
            self.fault(f"{task.name}: stopped at step {progress.step}: {progress.message}")
        else:
            more = f" ({progress.message})" if progress.message else ""
            if progress.state == "finished" and task.saved_step != progress.step:
                more += f", saved as it was at step {task.saved_step}, the best"
            self.note(f"{task.name}: {progress.state} at step {progress.step}{more}")

    def waits(self, names: Sequence[str], went_on: Sequence[str]) -> None:
        """Prints which tasks now wait for memory, and which no longer do."""
        new = [name for name in names if name not in self._waiting]
        self._waiting = names
        told = [f"{some(who)} {since}" for who, since in ((new, "now"), (went_on, "no longer")) if who]
        if told:
            self.note(f"waiting for memory: {', '.join(told)}; {len(names)} in all")

    def note(self, line: str) -> None:
        print(visible(line), file=self._out, flush=True)

    def warn(self, line: str) -> None:
        print(f"warning: {visible(line)}", file=self._err, flush=True)

    def fault(self, line: str) -> None:
        print(f"error: {visible(line)}", file=self._err, flush=True)
