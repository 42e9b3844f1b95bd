"""MLflow: a run for each adapter, below one parent run."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import requests
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunStatus
from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

from mlora.run.trackers.tracker import TrackedGroup, Tracker

_STATUS = {"finished": RunStatus.FINISHED, "stopped": RunStatus.FAILED}
"""MLflow's status of a run by how its adapter ended; others were killed."""
_PATIENCE = 20.0  # seconds for a server's first answer


class MlflowTracker(Tracker):
    """Logs under the names of Transformers' ``MLflowCallback``, to the tracking server that MLflow is set to.

    The experiment is ``project``, else the one that MLflow is set to, else ``Default``.
    """

    def __init__(self, group: TrackedGroup) -> None:
        self._client, self._group = MlflowClient(), group.name
        _check_answers(self._client.tracking_uri)
        name = group.project or MLFLOW_EXPERIMENT_NAME.get() or "Default"
        found = self._client.get_experiment_by_name(name)
        self._experiment = found.experiment_id if found else self._client.create_experiment(name)
        self._parent, self._ends = "", set[str]()
        self._runs: dict[str, str] = {}
        self.place = f"{self._client.tracking_uri}, experiment {name}"

    def go_on(self, known: Collection[str]) -> None:
        for one in known:
            self._parent = one.split("/")[0]

    def begin(self, adapter: str, known: str | None, config: Mapping[str, Any]) -> str:
        """Begins a run below the parent; an id is that of the parent and of the run, with a slash between."""
        running = RunStatus.to_string(RunStatus.RUNNING)
        if not self._parent:
            self._parent = self._new(self._group, {})
        elif not self._runs:
            self._client.update_run(self._parent, status=running)
        if known:
            run = known.split("/")[1]
            self._client.update_run(run, status=running)
        else:
            run = self._new(adapter, {MLFLOW_PARENT_RUN_ID: self._parent})
            params = [Param(key, str(value)[:MAX_PARAM_VAL_LENGTH]) for key, value in _flat(config)]
            for at in range(0, len(params), MAX_PARAMS_TAGS_PER_BATCH):
                self._client.log_batch(run, params=params[at : at + MAX_PARAMS_TAGS_PER_BATCH])
        self._runs[adapter] = run
        return f"{self._parent}/{run}"

    def _new(self, name: str, tags: dict[str, str]) -> str:
        return str(self._client.create_run(self._experiment, run_name=name, tags=tags).info.run_id)

    def log(self, adapter: str, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        metrics = [Metric(_allowed(key), value, now, step) for key, value in values.items()]
        self._client.log_batch(self._runs[adapter], metrics=metrics)

    def end(self, adapter: str, state: str) -> None:
        self._ends.add(state)
        status = RunStatus.to_string(_STATUS.get(state, RunStatus.KILLED))
        self._client.set_terminated(self._runs.pop(adapter), status)

    def close(self) -> None:
        """Ends the parent run, if it has begun."""
        if self._ends:
            status = RunStatus.KILLED if "interrupted" in self._ends else RunStatus.FINISHED
            self._client.set_terminated(self._parent, RunStatus.to_string(status))


def _check_answers(server: str) -> None:
    """Raises what `requests` does if a server does not answer; MLflow itself tries again for minutes."""
    if server.startswith(("http://", "https://")):
        with suppress(requests.exceptions.SSLError):  # MLflow has settings of its own for certificates
            requests.get(server, timeout=_PATIENCE, allow_redirects=False, stream=True).close()


def _flat(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested mappings, their keys joined by dots."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield _allowed(f"{before}{key}"), value


def _allowed(name: str) -> str:
    """Returns a name with underscores for what MLflow does not allow in one."""
    return re.sub(r"[^0-9A-Za-z_\-. :/]", "_", name)
