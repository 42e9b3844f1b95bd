"""Transformers' ``TrainerCallback``s, run for each adapter as ``Trainer`` runs them.

Each adapter has its own callbacks, `TrainingArguments`, `TrainerState` and `TrainerControl`. A checkpoint
holds the state, and those callbacks that are ``ExportableState``, so that a resumed run goes on with them.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mlora.cluster.device import choose_device, dtype_of
from mlora.config.run_config import RunConfig
from mlora.errors import NamedRunError, RunError, first_line, reason_of
from mlora.objectives.own_code import TorchSettings, is_own_failure
from mlora.run.callback_factory import Refusals, check_given, given_callbacks, named_callbacks
from mlora.run.reporter import Reporter, epoch_of, logs_of
from mlora.tasks.task import Task
from mlora_ext.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from transformers import TrainerCallback


class Callbacks(Reporter):
    """The callbacks of a run's adapters, and what they ask the training loop for.

    An adapter without callbacks costs nothing: what is due happens. A callback that raises stops its adapter:
    `failure` says why from then on.

    Args:
        given: the argument ``callbacks`` of `mlora.train`; those of the config come before them.
        reporter: is told of warnings.

    Raises:
        TypeError: `given` holds something that is no callback.
    """

    def __init__(self, config: RunConfig, given: Sequence[Any], reporter: Reporter) -> None:
        check_given(given)
        self._config, self._given, self._reporter = config, given, reporter
        self._made: dict[str, list[TrainerCallback]] = {}
        self._live: dict[str, _AdapterCallbacks] = {}
        self._refused: dict[str, str] = {}

    def make(self, adapter: str, specs: Sequence[Any] | None) -> list[TrainerCallback]:
        """Returns an adapter's callbacks, made on the first call; RunError if one cannot be made.

        `specs` are the ``callbacks`` of its config.
        """
        if adapter not in self._made:
            try:
                made = named_callbacks(specs or ()) + given_callbacks(adapter, self._given)
            except RunError as error:
                raise NamedRunError(adapter, str(error)) from error
            self._made[adapter] = made
        return self._made[adapter]

    def begin(self, task: Task) -> None:
        """Begins an adapter's training, or goes on with it after a resume; once in a process."""
        if task.name in self._live:
            return
        try:
            callbacks = self.make(task.name, task.config.callbacks)
        except RunError as error:  # of an adapter that has joined the run
            self._refused[task.name] = reason_of(error, task.name)
            return
        kept = task.progress.callbacks
        names = [type(one).__name__ for one in callbacks]
        lost = [name for name in kept.get("names", ()) if name not in names]
        if lost:
            self._reporter.warn(
                f"{task.name}: goes on without callbacks that it began with: {', '.join(lost)}; give them to "
                "`mlora.run.run.resume(RUN_DIR, callbacks=[...])`"
            )
        if callbacks:
            device = choose_device(self._config.device, dtype_of(self._config))
            self._live[task.name] = _AdapterCallbacks(task, callbacks, self._config, device)
            self._live[task.name].begin()

    def failure(self, task: Task) -> str:
        """Returns why an adapter's callbacks stop it with an error; empty if they do not."""
        own = self._live.get(task.name)
        return own.failure if own else self._refused.get(task.name, "")

    def batch_begins(self, tasks: Sequence[Task]) -> None:
        """A micro-batch of these adapters begins, and so may a step and an epoch."""
        for task in tasks:
            if own := self._live.get(task.name):
                own.batch_begins()

    def event(self, task: Task, name: str) -> None:
        """Tells an adapter's callbacks of an event by its name there, such as ``on_substep_end``."""
        if own := self._live.get(task.name):
            own.call(name)

    def step_ends(self, task: Task, record: dict[str, Any], *, log: bool, evaluate: bool, save: bool) -> bool:
        """An adapter made a step; says what is due after it. Returns whether the step is to be logged."""
        own = self._live.get(task.name)
        return own.step_ends(record, log=log, evaluate=evaluate, save=save) if own else log

    def evaluates(self, task: Task, *, due: bool) -> bool:
        """Whether to evaluate an adapter that has made a step."""
        own = self._live.get(task.name)
        if own is None:
            return due
        if own.control.should_evaluate and task.eval_data is None:
            own.control.should_evaluate = False
            self._reporter.warn(
                f"{task.name}: a callback asks for an evaluation, but there is no eval_dataset"
            )
        return own.control.should_evaluate

    def saves(self, task: Task) -> bool:
        """Whether callbacks ask for a checkpoint after the step just made, and none is due."""
        own = self._live.get(task.name)
        return own is not None and own.control.should_save and not own.save_due

    def stopped_by(self, task: Task) -> str:
        """Returns the class of the callback that asks to end an adapter's training; empty if none does."""
        own = self._live.get(task.name)
        return own.stopped_by if own and own.control.should_training_stop else ""

    def evaluation(self, task: Task, record: dict[str, Any]) -> None:
        if own := self._live.get(task.name):
            own.evaluated(record)

    def saved(self, tasks: Sequence[Task]) -> None:
        """A checkpoint of these adapters is about to be written."""
        for task in tasks:
            if own := self._live.get(task.name):
                own.saved()
        self.keep(tasks)  # shows whether that is possible

    def keep(self, tasks: Sequence[Task]) -> None:
        """Puts into the progress of adapters what a checkpoint needs."""
        for task in tasks:
            if own := self._live.get(task.name):
                task.progress.callbacks = own.kept()

    def changed(self, task: Task) -> None:
        """Ends the callbacks of an adapter that has ended without a fault."""
        if task.alive or not (own := self._live.pop(task.name, None)):
            return
        task.progress.callbacks = {}
        if task.progress.state != "stopped":
            own.end(saved=task.progress.state == "finished")
        if own.failure and task.progress.state != "stopped":
            self._reporter.warn(f"{task.name}: {own.failure}, after its training had ended")


class _AdapterCallbacks:
    """The callbacks of one adapter, with what they see and ask for.

    Attributes:
        control: what callbacks ask for.
        save_due: whether a checkpoint is due after the last step, whatever callbacks say.
        failure: why one of them stops the adapter; then none is called any more.
        stopped_by: the class of the one that asked to end the training.
    """

    def __init__(
        self, task: Task, callbacks: Sequence[TrainerCallback], config: RunConfig, device: str
    ) -> None:
        from transformers import TrainerControl

        from mlora.run.trainer_view import arguments_of, state_of

        self.control, self.save_due, self.failure, self.stopped_by = TrainerControl(), False, "", ""
        self._task, self._callbacks = task, list(callbacks)
        self._args = arguments_of(task, config, device)
        self._state = state_of(task, self._args)
        self._epoch: int | None = None  # the one under way, from 0
        if task.progress.callbacks:
            with Refusals(f"{task.name}: callbacks: their states cannot be restored"):
                self._restore(task.progress.callbacks)

    def _restore(self, kept: dict[str, Any]) -> None:
        from transformers import TrainerControl, TrainerState

        self._epoch, self.stopped_by = kept["epoch"], kept["stopped_by"]
        self._state = TrainerState(**kept["state"])
        stateful: Any = self._state.stateful_callbacks  # a list becomes a dict of states by class
        states = {
            name: list(found) if isinstance(found, list) else [found] for name, found in stateful.items()
        }
        self.control = TrainerControl.from_state(states["TrainerControl"][0])
        for index, one in enumerate(self._callbacks):
            kind: Any = type(one)
            if found := states.get(kind.__name__):
                self._callbacks[index] = kind.from_state(found.pop(0))

    def kept(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: plain values, as ``trainer_state.json`` has them."""
        from transformers import TrainerState
        from transformers.trainer_callback import ExportableState

        with _CallbackFailures(self, "a callback", "state"):
            stateful: Any = [
                one for one in (*self._callbacks, self.control) if isinstance(one, ExportableState)
            ]
            self._state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks
            return {
                "state": json.loads(json.dumps(asdict(self._state))),
                "names": [type(one).__name__ for one in self._callbacks],
                "epoch": self._epoch,
                "stopped_by": self.stopped_by,
            }
        return {}

    def call(self, event: str, **more: Any) -> None:
        """Calls one event of each callback, with the arguments that ``Trainer`` gives."""
        absent = dict.fromkeys(
            (
                "model",
                "processing_class",
                "optimizer",
                "lr_scheduler",
                "train_dataloader",
                "eval_dataloader",
            )
        )
        for one in self._callbacks:
            if self.failure:
                return
            name, stopping = type(one).__name__, self.control.should_training_stop
            with _CallbackFailures(self, f"the callback {name}", event):
                found = getattr(one, event)(self._args, self._state, self.control, **absent, **more)
                self.control = found or self.control
            if self.control.should_training_stop and not stopping:
                self.stopped_by = name
            if self.control.should_epoch_stop:
                self.failure = (
                    f"the callback {name} sets should_epoch_stop, which runs do not serve; set "
                    "should_training_stop"
                )

    def begin(self) -> None:
        self.call("on_init_end")
        if not self._task.progress.callbacks:
            self.control.should_training_stop = False
        self.call("on_train_begin")

    def batch_begins(self) -> None:
        task = self._task
        batches = task.progress.batches
        if batches and not task.plan.ends_step(batches - 1):
            return
        if self._epoch is None:
            self._epoch = self._epoch_now()
            self.call("on_epoch_begin")
        self.control.should_log = self.control.should_evaluate = self.control.should_save = False
        self.call("on_step_begin")

    def _epoch_now(self) -> int:
        return self._task.progress.batches // max(1, self._task.plan.batches_per_epoch)

    def step_ends(self, record: dict[str, Any], *, log: bool, evaluate: bool, save: bool) -> bool:
        task, control, self.save_due = self._task, self.control, save
        self._state.global_step, self._state.epoch = task.progress.step, epoch_of(task)
        control.should_log |= log
        control.should_evaluate |= evaluate
        control.should_save |= save
        control.should_training_stop |= task.progress.step >= task.total_steps
        self.call("on_step_end")
        last = task.progress.step >= task.total_steps or self.control.should_training_stop
        if self._epoch is not None and (last or self._epoch_now() > self._epoch):
            self._end_epoch()
        logs = self.control.should_log
        if logs:
            self._log(logs_of(task, record))
        return logs

    def _end_epoch(self) -> None:
        self._epoch = None
        self.call("on_epoch_end")

    def _log(self, logs: dict[str, float]) -> None:
        self._state.log_history.append({**logs, "step": self._task.progress.step})
        self.control.should_log = False
        self.call("on_log", logs=logs)

    def evaluated(self, record: dict[str, Any]) -> None:
        progress, metrics = self._task.progress, logs_of(self._task, record)
        self._log(dict(metrics))
        self.control.should_evaluate = False
        self.call("on_evaluate", metrics=metrics)
        # as in Trainer, after callbacks have compared with the one before
        self._state.best_metric, self._state.best_global_step = progress.best, progress.best_step

    def saved(self) -> None:
        self.control.should_save = False
        self.call("on_save")

    def end(self, *, saved: bool) -> None:
        if saved:
            if self._epoch is not None:
                self._end_epoch()
            self.saved()
        self.call("on_train_end")


class _CallbackFailures:
    """Keeps what a callback raises, or changes of torch's settings, as its adapter's failure.

    Errors of memory concern the whole run.
    """

    def __init__(self, owner: _AdapterCallbacks, who: str, event: str) -> None:
        self._owner, self._who, self._event = owner, who, event

    def __enter__(self) -> None:
        self._settings = TorchSettings()

    def __exit__(self, kind: object, error: BaseException | None, trace: Any) -> bool:
        changed = self._settings.put_back()
        if error is None and changed:
            self._owner.failure = f"{self._who} failed in {self._event}: {changed}"
        if error is None or not is_own_failure(error) or is_out_of_memory(error):
            return False
        place = traceback.extract_tb(trace)[-1]
        reason = f"{type(error).__name__}: {first_line(error)}, in {place.filename}:{place.lineno}"
        self._owner.failure = f"{self._who} failed in {self._event}: {reason}"
        return True
