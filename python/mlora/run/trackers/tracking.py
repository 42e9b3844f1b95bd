"""Tells trackers what adapters do: their steps, evaluations and ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mlora.config.run_config import RunConfig
from mlora.config.tracking import missing_packages
from mlora.errors import RunError, first_line
from mlora.run.callback_factory import Refusals
from mlora.run.reporter import Reporter, logs_of
from mlora.run.trackers.tracked_runs import Kind, TrackedRuns, kind_of
from mlora.run.trackers.tracker import TrackedGroup, Tracker
from mlora.tasks.task import Task

PATIENCE = 60.0  # seconds that the end of a run waits for what trackers are still to be sent
_CLASSES = {
    "tensorboard": "TensorBoardTracker",
    "wandb": "WandbTracker",
    "mlflow": "MlflowTracker",
    "trackio": "TrackioTracker",
}
"""The class of each tracker, in the file of its name in this folder."""


def check_trackers(config: RunConfig) -> None:
    """Raises RunError if the package of a tracker is not installed."""
    lacking = missing_packages(config.report_to)
    if lacking:
        packages, verb = " ".join(lacking), "is" if len(lacking) == 1 else "are"
        raise RunError(f"report_to: {', '.join(lacking)} {verb} not installed: pip install {packages}")


def open_trackers(config: RunConfig, folder: Path) -> dict[str, Tracker]:
    """Returns the trackers of a run by name. Raises RunError if one cannot be reached.

    `folder` is that of TensorBoard's files where the config names none.
    """
    group = TrackedGroup(
        config.run_name or Path(config.output_dir).name,
        config.project,
        Path(config.logging_dir or folder),
    )
    return {name: _opened(name, group) for name in config.report_to}


def _opened(name: str, group: TrackedGroup) -> Tracker:
    go_on = "; put that right, or go without by --set report_to=none"
    with Refusals(f"report_to: {name}", go_on, typed=False):
        module = import_module(f"mlora.run.trackers.{name}")
        tracker: Tracker = getattr(module, _CLASSES[name])(group)
    return tracker


class _Failures:
    """Keeps what a tracker raised first, in one line; libraries may raise anything."""

    def __init__(self) -> None:
        self.told = ""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self.told = self.told or f"{type(error).__name__}: {first_line(error)}"
        return True


class Background:
    """A tracker and its thread, so that training never waits for it. After a failure nothing more is sent."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker, self._failures = tracker, _Failures()
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    @property
    def fault(self) -> str:
        """Why nothing is sent any more; empty while all is well."""
        return self._failures.told

    def tell(self, call: Callable[[], object]) -> None:
        """Adds a call to those that the thread makes, one after the other."""
        self._calls.put(call)

    def _work(self) -> None:
        for call in iter(self._calls.get, None):
            if not self.fault:
                with self._failures:
                    call()

    def stop(self) -> None:
        """Ends the thread once it has made all calls."""
        self._calls.put(None)

    def wait(self, seconds: float) -> bool:
        """Waits until the thread has ended, for so many seconds at most; returns whether it has."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def give_up(self, reason: str) -> None:
        """Sends nothing more, for this reason."""
        self._failures.told = self._failures.told or reason


class Tracking(Reporter):
    """Sends the values of each adapter to trackers, every ``logging_steps`` and after its last step.

    A tracker that fails costs one warning; training goes on without it.

    Args:
        runs: which tracking runs an earlier part of this run has begun.
        reporter: is told of trackers that fail.
        patience: seconds that the end of the run waits for all trackers.
    """

    def __init__(
        self,
        config: RunConfig,
        trackers: Mapping[str, Tracker],
        runs: TrackedRuns,
        reporter: Reporter,
        patience: float = PATIENCE,
    ) -> None:
        self._config, self._runs, self._reporter, self._patience = config, runs, reporter, patience
        self._trackers = {name: Background(each) for name, each in trackers.items()}
        self._begun: set[str] = set()  # adapters whose tracking runs have begun, and have not ended
        for name, each in trackers.items():
            each.go_on(runs.ids(name).values())
            reporter.note(f"{name}: {each.place}")

    def step(self, task: Task, record: dict[str, Any]) -> None:
        self._begin(task)
        self._warn()

    def logged(self, task: Task, record: dict[str, Any]) -> None:
        self._log(task, record)

    def evaluation(self, task: Task, record: dict[str, Any]) -> None:
        self._log(task, record)

    def changed(self, task: Task) -> None:
        if not task.alive:
            self._end(task.name, task.progress.state)
        self._warn()

    def close(self) -> None:
        """Ends the tracking runs of adapters that have not ended, and waits until all values are sent."""
        for adapter in list(self._begun):
            self._end(adapter, "interrupted")
        for each in self._trackers.values():
            each.tell(each.tracker.close)
            each.stop()
        until = time.monotonic() + self._patience
        for each in self._trackers.values():
            if not each.wait(until - time.monotonic()):
                each.give_up(f"did not take all values within {self._patience:g} s")
        self._warn()

    def _begin(self, task: Task) -> None:
        if task.name in self._begun:
            return
        self._begun.add(task.name)
        whole = self._config.model_dump(mode="json", exclude={"adapters", "datasets", "defaults", "sweep"})
        own = task.config.model_dump(mode="json")
        config = whole | {key: value for key, value in own.items() if value is not None}
        for name, each in self._trackers.items():
            each.tell(partial(self._begin_one, name, each.tracker, task.name, config))

    def _begin_one(self, name: str, tracker: Tracker, adapter: str, config: Mapping[str, Any]) -> None:
        known = self._runs.ids(name).get(adapter)
        id = tracker.begin(adapter, known, config)
        if id != known:
            self._runs.write(name, adapter, id=id)

    def _log(self, task: Task, record: dict[str, Any]) -> None:
        self._begin(task)
        step, kind, values = record["step"], kind_of(record), logs_of(task, record)
        for name, each in self._trackers.items():
            if step > self._runs.taken(name, task.name, kind):
                each.tell(partial(self._log_one, name, each.tracker, task.name, values, step, kind))
        self._warn()

    def _log_one(
        self, name: str, tracker: Tracker, adapter: str, values: Mapping[str, float], step: int, kind: Kind
    ) -> None:
        tracker.log(adapter, values, step)
        self._runs.write(name, adapter, **{kind: step})

    def _end(self, adapter: str, state: str) -> None:
        if adapter in self._begun:
            self._begun.remove(adapter)
            for each in self._trackers.values():
                each.tell(partial(each.tracker.end, adapter, state))

    def _warn(self) -> None:
        """Warns of trackers that have failed, and leaves them out."""
        for name, each in list(self._trackers.items()):
            if each.fault:
                del self._trackers[name]
                each.stop()
                self._reporter.warn(f"report_to: {name}: {each.fault}; training goes on without it")
