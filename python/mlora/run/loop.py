"""The training loop of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from mlora.cluster.signals import Interrupted
from mlora.config.sweep_config import is_trial
from mlora.engine.adapter_state import BatchResult, added, means
from mlora.engine.batcher import BatchFuture
from mlora.errors import RunError, file_line
from mlora.objectives.custom import CustomLoss
from mlora.optim.optimizer import OptimizerError
from mlora.pipeline import PipelineError
from mlora.run.callbacks import Callbacks
from mlora.run.evaluation import Answers, answer_prompts, evaluate_losses
from mlora.run.forecasts import forecast_lines
from mlora.run.inputs import fingerprints
from mlora.run.prepare import Prepared
from mlora.run.stages import less_memory
from mlora.run.task_states import compare, never_best, write_best
from mlora.run.task_table import TaskEvent
from mlora.run.trial_losses import not_measured
from mlora.store.checkpoint_writer import CheckpointWriter
from mlora.store.disk import checksum_of
from mlora.store.loss_plot import plot_losses
from mlora.store.run_folder import Metrics, read_metrics
from mlora.store.samples import append_samples, samples_size
from mlora.store.state_files import StateFiles, best_file
from mlora.sweep.outcome import write_outcome
from mlora.tasks.groups import Group, Rounds
from mlora.tasks.result import AdapterResult, RunResult, Status, adapter_result
from mlora.tasks.task import Task
from mlora_ext.out_of_memory import is_out_of_memory

_NO_GRADIENT = 3
"""Steps in a row without a gradient that are worth a warning."""


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that JSON can hold: an objective's metric may be NaN or infinite."""
    return {key: value for key, value in values.items() if math.isfinite(value)}


class TrainingLoop:
    """Runs the iterations of a run.

    Each iteration of a group takes one batch from each of its tasks, as far as memory allows. The batches
    pass through the model together. Then each task with a complete accumulation makes an optimizer step. On
    one device all tasks form one group; a pipeline is filled by several groups. Tasks come and go at
    iteration boundaries. A run depends only on its config, its journaled decisions and the number of
    iterations, never on timing.

    After a signal only the micro-batches under way are finished. An evaluation or answers that it interrupts
    count for nothing; the resume makes them anew.
    """

    def __init__(
        self, prepared: Prepared, metrics: Metrics, writer: CheckpointWriter, callbacks: Callbacks
    ) -> None:
        self._run, self._metrics, self._writer = prepared, metrics, writer
        self._callbacks, self._save_asked = callbacks, bool(prepared.rounds.get("save_asked"))
        self._caught: Sequence[int] = ()
        self._table, self._decisions = prepared.table, prepared.decisions
        self._engine, self._folder, self._reporter = prepared.engine, self._table.folder, self._table.reporter
        self._began = time.monotonic() - prepared.seconds
        self._last_step: dict[str, float] = {}
        self._planned = prepared.config.offload.activations != "auto"
        self._rounds = Rounds(prepared.table.members(), prepared.iteration, prepared.decisions.stops)
        self._rounds.waiting = prepared.decisions.minds_ends()
        self._states = StateFiles(self._folder)

    def train(self, caught: Sequence[int]) -> None:
        """Iterates until no task runs or a signal was caught, then writes a durable checkpoint."""
        self._caught = caught
        self._decisions.stopping = lambda: bool(caught)
        self._write_summary("running")
        try:
            self._begin(self._table.admitted())
            for tasks in self._table.members().values():
                self._after_step([task for task in tasks if task.progress.evaluation_due])
            self._rounds.regroup(self._table.members(), self._run.iteration)
            if self._run.rounds:
                self._rounds.go_on(self._run.rounds)
            self._plan_activations()
            self._iterate()
            self._checkpoint()
        except (MemoryError, RuntimeError, OSError, FloatingPointError) as error:
            # a stage that is a thread of this process; other processes report their own faults
            cause = error.__cause__ if isinstance(error, PipelineError) else error
            if isinstance(cause, OSError) and cause.filename is not None:
                raise RunError(
                    f"iteration {self._run.iteration + 1}: {file_line(cause)}; put that right, then go on "
                    f"with `mlora resume {self._folder.path}`"
                ) from error
            if isinstance(cause, FloatingPointError | OptimizerError):
                raise RunError(f"iteration {self._run.iteration + 1}: {cause}") from error
            if cause is None or not is_out_of_memory(cause):
                raise
            raise RunError(
                f"out of memory at iteration {self._run.iteration + 1}; {less_memory(self._folder.path)}"
            ) from error
        self._writer.wait()
        self._states.prune([task.name for task in self._table.tasks])

    def _plan_activations(self) -> None:
        """Lets each stage plan what becomes of its activations, if the config leaves that to it."""
        if self._planned or self._caught or not self._rounds.groups:
            return
        # the gradients that a task has accumulated would be lost
        tasks = [task for task in self._rounds.groups[0].running() if not task.progress.open_units]
        try:
            lines = forecast_lines(self._engine, tasks)
        except RunError as error:
            raise RunError(f"{error}, in {self._folder.config}, and use `mlora resume`") from error
        for line in lines:
            self._reporter.note(line)
        self._planned = bool(tasks)

    def _begin(self, tasks: Sequence[Task]) -> None:
        """Evaluates new tasks if they never were, and starts the clock of their next step."""
        for task in tasks:
            if task.progress.state == "running":
                self._callbacks.begin(task)
        tasks = self._without_failed(tasks)
        self._evaluate([task for task in tasks if not task.progress.evaluations])
        self._without_failed(tasks)
        self._last_step |= dict.fromkeys((task.name for task in tasks), time.monotonic())

    def _without_failed(self, tasks: Sequence[Task]) -> list[Task]:
        """Stops running tasks whose callbacks have failed; returns the others."""
        for task in tasks:
            failure = self._callbacks.failure(task)
            if failure and task.progress.state == "running":
                self._end(task, "stopped", failure)
        return [task for task in tasks if task.progress.state == "running"]

    def finish(self, caught: int | None) -> RunResult:
        """Writes the final files of a run, or of a part of it that a signal ended; returns the result."""
        tasks = self._table.tasks
        status: Status = "failed" if self._failed() else "finished"
        left = caught is not None and self._decisions.due(self._run.iteration) is not None
        if self._table.alive() or left:
            status = "interrupted" if self._table.running() or left else "paused"
        self._decisions.show(now=True)
        result = self._write_summary(status, caught)
        names = [task.name for task in tasks]
        records = read_metrics(self._folder.metrics)
        plot_losses(self._folder.plot, names, records)
        if self._run.config.sweep:
            write_outcome(self._folder, self._run.config.sweep)
        return result

    def _failed(self) -> bool:
        """Whether a task other than a trial was refused or stopped, or no trial of a sweep finished."""
        states: dict[str, str] = {task.name: task.progress.state for task in self._table.tasks}
        states |= dict.fromkeys(self._table.refused, "refused")
        names = filter(is_trial, list(states)) if self._run.config.sweep else ()
        trials = {name: states.pop(name) for name in names}
        failed = not {"refused", "stopped"}.isdisjoint(states.values())
        return failed or (bool(trials) and "finished" not in trials.values())

    def _write_summary(self, status: Status, caught: int | None = None) -> RunResult:
        done = {task.name: adapter_result(task) for task in self._table.tasks}
        done |= {name: AdapterResult("refused", message) for name, message in self._table.refused.items()}
        names = [adapter.name for adapter in self._run.config.adapters]
        adapters = {name: done[name] for name in [*names, *done]}
        seconds = time.monotonic() - self._began
        result = RunResult(status, self._folder.path, seconds, adapters, caught)
        self._folder.write_summary(result.summary())
        return result

    def _iterate(self) -> None:
        """Keeps one batch of each group under way until no task runs or a signal was caught."""
        rounds, under_way = self._rounds, dict[BatchFuture, Group]()
        rounds.wanted = True  # first comes what is due at this boundary
        while True:
            rounds.wanted |= self._decisions.asked()
            while not self._caught and (group := rounds.next()) is not None:
                under_way[self._start(group)] = group
            if under_way:
                future = self._engine.first_done(list(under_way))
                self._finish(under_way.pop(future), future)
                self._metrics.check_place()
                self._writer.check()
            elif self._caught:
                self._settle(self._table.admitted())
                return
            elif not self._go_on(rounds.boundary()):
                return

    def _go_on(self, iteration: int) -> bool:
        """Does what is due at an iteration boundary and returns whether the run goes on."""
        self._metrics.check_place()
        save = self._rounds.save_due(iteration) or self._decisions.trial_ended() or self._save_asked
        self._save_asked = False
        self._settle(self._table.admitted())
        if save:
            self._tell_saved(iteration)
        iteration = self._decide(iteration)
        self._rounds.settled(iteration)
        going_on = bool(self._table.members())
        if going_on:
            self._plan_activations()
        if save and going_on and not self._caught:  # `train` writes one at the end
            self._checkpoint()
        return going_on

    def _tell_saved(self, iteration: int) -> None:
        """Tells callbacks of a checkpoint before it is written, so that it holds what they make of it."""
        running = [task for task in self._table.admitted() if task.progress.state == "running"]
        self._callbacks.saved(running)
        if len(self._without_failed(running)) < len(running):
            self._rounds.regroup(self._table.members(), iteration)

    def _decide(self, iteration: int) -> int:
        """Makes the decisions that are due at a boundary and returns the iteration after them.

        Decides again if an admitted task is refused or stopped by its first evaluation: others may take its
        room.
        """
        while not self._caught and (due := self._decisions.due(iteration)) is not None:
            new = self._decisions.decide(due, at_once=due > iteration)
            self._run.iteration = iteration = due
            self._begin(new)
            self._rounds.regroup(self._table.members(), iteration)
            self._rounds.waiting = self._decisions.minds_ends()
            self._write_summary("running")
        return iteration

    def _start(self, group: Group) -> BatchFuture:
        running = group.batched = self._table.next_batch(group)
        batches = {
            task.name: [task.data.samples[row] for row in task.plan.batch(task.progress.batches)]
            for task in running
        }
        ends = [task.name for task in running if task.plan.ends_step(task.progress.batches)]
        self._callbacks.batch_begins(running)
        return self._engine.start(batches, ends=ends, measure=self._table.worth_measuring(running))

    def _finish(self, group: Group, future: BatchFuture) -> None:
        results = self._engine.finish(future, raises=False)
        self._table.passed(future.measured)
        stepped = self._without_failed(
            [task for task in group.batched if self._take(task, results[task.name])]
        )
        for task in stepped:
            task.progress.evaluation_due = self._callbacks.evaluates(task, due=self._evaluation_due(task))
        self._settle([task for task in stepped if task.progress.evaluation_due or self._ends(task)])
        self._after_step(stepped)
        self._without_failed(group.batched)
        self._rounds.ended(group)
        self._run.iteration = max(self._run.iteration, group.iteration)
        self._decisions.show()

    def _after_step(self, tasks: Sequence[Task]) -> None:
        """Evaluates tasks that have made a step, where that is due, and ends those that are done."""
        self._evaluate([t for t in tasks if t.progress.evaluation_due and t.progress.state == "running"])
        for task in self._without_failed(tasks):
            if task.progress.evaluation_due:  # a signal came
                continue
            if task.progress.step >= task.total_steps:
                self._end(task, "finished", "")
            elif who := self._callbacks.stopped_by(task):
                self._end(task, "finished", f"stopped by {who}")
            elif self._callbacks.saves(task):
                self._save_asked = self._rounds.wanted = True

    def _ends(self, task: Task) -> bool:
        """Whether a task that has made a step ends with it."""
        return task.progress.step >= task.total_steps or bool(self._callbacks.stopped_by(task))

    def _take(self, task: Task, result: BatchResult) -> bool:
        """Counts a micro-batch and steps after an accumulation's last one; returns whether it did."""
        progress = task.progress
        if not result.finite:
            self._stop(task, f"loss of step {progress.step + 1}", result.fault)
            return False
        progress.open_loss += result.loss_sum
        progress.open_tokens += result.tokens
        progress.open_units += result.units
        progress.open_metrics = added(progress.open_metrics, result.metrics)
        progress.open_counts = added(progress.open_counts, result.counts)
        complete = task.plan.ends_step(progress.batches)
        progress.batches += 1
        if complete and not progress.open_units:
            self._stop(task, "", f"the objective's units of step {progress.step + 1} sum to 0")
            return False
        if not complete:
            self._callbacks.event(task, "on_substep_end")
        return complete and self._step(task)

    def _step(self, task: Task) -> bool:
        progress = task.progress
        self._callbacks.event(task, "on_pre_optimizer_step")
        try:
            result = self._engine.optim_step(task.name)
        except OptimizerError as error:
            self._end(task, "stopped", error.message)
            return False
        if not result.finite and not result.skipped:
            self._stop(task, f"gradient of step {progress.step + 1}")
            return False
        self._callbacks.event(task, "on_optimizer_step")
        now = time.monotonic()
        seconds, self._last_step[task.name] = now - self._last_step[task.name], now
        progress.step += 1
        progress.loss = progress.open_loss / progress.open_units
        progress.tokens += progress.open_tokens
        progress.seconds += seconds
        record: dict[str, Any] = {
            "adapter": task.name,
            "step": progress.step,
            "loss": progress.loss,
            "tokens": progress.open_tokens,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm if result.finite else None,
            "seconds": seconds,
            "peak_memory_bytes": self._engine.peak_memory,
        }
        found = means(progress.open_metrics, progress.open_counts, progress.open_units)
        progress.metrics = _finite({key: value for key, value in found.items() if key not in record})
        record |= progress.metrics
        if result.skipped:
            record["skipped"] = True
        self._watch_gradient(task, result.grad_norm)
        progress.open_loss, progress.open_tokens, progress.open_units = 0.0, 0, 0
        progress.open_metrics, progress.open_counts = {}, {}
        self._metrics.write(**record)
        self._reporter.step(task, record)
        if self._logs(task, record):
            self._reporter.logged(task, record)
        return True

    def _watch_gradient(self, task: Task, norm: float) -> None:
        """Warns once of an adapter that has a loss, but no gradient: no weight of it changes its loss.

        Rounding does not give exactly 0 in several batches. Losses with a margin do, and are 0 themselves.
        """
        progress = task.progress
        before, silent = progress.no_gradient, norm == 0 and bool(progress.loss)
        progress.no_gradient = before + 1 if silent else 0
        if before >= _NO_GRADIENT and not silent:  # it learns again
            progress.message = ""
        if progress.no_gradient == _NO_GRADIENT and not progress.message:
            progress.message = (
                f"its gradient is exactly 0 since step {progress.step - _NO_GRADIENT + 1}, so it no longer "
                "learns; try a lower learning_rate"
            )
            self._reporter.warn(f"{task.name}: {progress.message}")

    def _logs(self, task: Task, record: dict[str, Any]) -> bool:
        """Tells callbacks of a step, and of all that is due after it; returns whether the step is logged."""
        step, last = task.progress.step, task.progress.step >= task.total_steps
        logging, saving = task.every(task.config.logging_steps), task.every(task.config.save_steps)
        return self._callbacks.step_ends(
            task,
            record,
            log=last or bool(logging and step % logging == 0),
            evaluate=self._evaluation_due(task),
            save=last or bool(saving and step % saving == 0),
        )

    def _settle(self, tasks: Sequence[Task]) -> None:
        """Lets the stages make the steps that were decided, and ends tasks whose optimizers fail."""
        failed = self._engine.settle([task.name for task in tasks if task.progress.state == "running"])
        for task in tasks:
            if task.name in failed:
                self._end(task, "stopped", failed[task.name])

    def _evaluation_due(self, task: Task) -> bool:
        steps = task.every(task.config.eval_steps)
        last = task.progress.step >= task.total_steps
        return task.eval_data is not None and (last or bool(steps and task.progress.step % steps == 0))

    def _evaluate(self, tasks: Sequence[Task]) -> None:
        """Evaluates tasks, unless a signal comes meanwhile: then nothing changes."""
        tasks = [task for task in tasks if task.eval_data is not None]
        if not tasks:
            return
        try:
            losses = evaluate_losses(self._engine, tasks, self._table.fits, self._check)
            answers = self._answers([t for t in tasks if losses[t.name].finite and losses[t.name].units])
        except Interrupted:
            return
        for task in tasks:
            task.progress.evaluation_due = False
            if not losses[task.name].finite:
                self._stop(task, f"eval_loss after step {task.progress.step}", losses[task.name].fault)
            elif not losses[task.name].units:
                self._stop(task, "", "the objective's units of the evaluation data sum to 0")
        tasks = [task for task in tasks if task.progress.state == "running"]
        if answers:
            append_samples(
                self._folder.samples,
                (
                    {"adapter": name, "step": task.progress.step, "samples": answers[name].samples}
                    for task in tasks
                    if (name := task.name) in answers
                ),
            )
        for task in tasks:
            found = losses[task.name]
            entry: dict[str, Any] = {"step": task.progress.step, "eval_loss": found.loss_sum / found.units}
            if task.name in answers:
                entry["eval_exact_match"] = answers[task.name].share
            more = {f"eval_{name}": value for name, value in found.mean_metrics().items()}
            entry |= {key: value for key, value in more.items() if key != "eval_loss"}
            task.progress.evaluations.append(entry)
            record = {"adapter": task.name, **_finite(entry), "eval_tokens": found.tokens}
            rule = task.config.best_rule
            measured = rule is None or rule.metric in entry
            if rule is not None and measured and self._is_best(task, entry):
                record["best"] = rule.metric
            self._metrics.write(**record)
            self._reporter.evaluation(task, record)
            lacking = [(key, metric) for key, metric in self._asked(task) if metric not in entry]
            if lacking:
                has = [key for key in entry if key != "step"]
                self._end(task, "stopped", not_measured(*lacking[0], has))
        tasks = [task for task in tasks if task.progress.state == "running"]
        for task in tasks:
            self._stop_early(task)

    def _check(self) -> None:
        """Raises Interrupted if a signal was caught."""
        if self._caught:
            raise Interrupted

    def _answers(self, tasks: Sequence[Task]) -> Mapping[str, Answers]:
        """Answers prompts of tasks only at step 0, at the end, and where evaluations are compared."""
        asked = [
            task
            for task in tasks
            if task.config.eval_exact_match
            and (task.progress.step in (0, task.total_steps) or task.config.best_rule is not None)
        ]
        if not asked:
            return {}
        return answer_prompts(self._engine, asked, self._run.base, self._table.fits, self._check)

    def _asked(self, task: Task) -> Iterator[tuple[str, str]]:
        """Yields the metrics that each evaluation of a task must have, after the keys that ask for them."""
        rule, sweep = task.config.best_rule, self._run.config.sweep
        if rule is not None:
            yield "metric_for_best_model", rule.metric
        if sweep is not None and is_trial(task.name) and sweep.metric != "eval_exact_match":
            yield "sweep.metric", sweep.metric

    def _is_best(self, task: Task, entry: Mapping[str, Any]) -> bool:
        """Counts an evaluation and returns whether it is the best so far; if so, keeps the weights."""
        before = task.progress.best_step
        doubt = never_best(task)
        if doubt is not None:
            self._reporter.warn(doubt)
        if not compare(task, entry):
            return False
        if task.kept_step is not None:
            write_best(self._engine, task, self._folder.states)
            if before is not None:
                self._states.drop(best_file(task.name, before))
        return True

    def _stop_early(self, task: Task) -> None:
        patience, rule, progress = task.config.early_stopping_patience, task.config.best_rule, task.progress
        if patience is None or rule is None or progress.worse < patience:
            return
        if progress.step < task.total_steps:
            self._end(
                task, "finished", f"stopped early: {rule.metric} did not improve in {patience} evaluations"
            )

    def _stop(self, task: Task, what: str, fault: str = "") -> None:
        """Ends a task with a value that is not a number, or whose objective failed.

        Before its first step no learning rate caused it.
        """
        hint = "; try a lower learning_rate" if task.progress.step else ""
        if isinstance(task.objective, CustomLoss):
            hint += f"{', and' if hint else ';'} look at the objective {task.objective.told}"
        self._end(task, "stopped", fault or f"the {what} is not a number{hint}")

    def _end(self, task: Task, state: Literal["finished", "stopped"], message: str) -> None:
        self._metrics.check_place()
        self._table.apply(TaskEvent(state, task.name, message))
        self._write_summary("running")

    def _data(self) -> dict[str, list[str]]:
        """Returns the digests of the data of tasks that go on, or that a larger ``max_steps`` continues."""
        found = {task.name: fingerprints(task) for task in self._table.alive()}
        for task in self._table.extendable():
            if task.data.samples:
                found[task.name] = fingerprints(task)
            elif task.name in self._run.data:  # it had ended before this process began
                found[task.name] = self._run.data[task.name]
        return found

    def _checkpoint(self) -> None:
        """Starts a checkpoint. Adapters that it calls finished are already durable on disk."""
        self._callbacks.keep(self._table.alive())
        payload = {
            "iteration": self._run.iteration,
            "seconds": time.monotonic() - self._began,
            "metrics_bytes": self._metrics.size,
            "metrics_crc32": self._metrics.checksum,
            "samples_bytes": (size := samples_size(self._folder.samples)),
            "samples_crc32": checksum_of(self._folder.samples, size) if size else 0,
            "config": self._run.config.model_dump(),
            "base": self._engine.base_digest,
            "decisions": self._decisions.state(self._run.iteration),
            "refused": self._table.refused,
            "data": self._data(),
            "sweep_inputs": dict(self._run.sweep_inputs),
            "total_steps": {task.name: task.total_steps for task in self._table.tasks},
            "tasks": {task.name: asdict(task.progress) for task in self._table.tasks},
            "best": [best_file(t.name, t.kept_step) for t in self._table.alive() if t.kept_step is not None],
            "rounds": {**self._rounds.state(), "save_asked": self._save_asked},
        }
        states = ((task.name, self._engine.state_dict(task.name)) for task in self._table.admitted())
        self._states.name(payload)
        self._writer.start(self._run.iteration, payload, states)
        # `start` has waited until the previous checkpoint is durable
        self._states.prune([task.name for task in self._table.tasks])
