"""Trackio: a run for each adapter, in one group."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import Context
from typing import Any

import trackio
from transformers.integrations.integration_utils import rewrite_logs

from mlora.run.trackers.tracker import TrackedGroup, Tracker


class TrackioTracker(Tracker):
    """Logs under the names of Transformers' ``TrackioCallback``; runs are called ``<group>/<adapter>``."""

    def __init__(self, group: TrackedGroup) -> None:
        self._group, self._project = group.name, group.project or "huggingface"
        self.place = f"project {self._project}, group {self._group}"
        self._runs: dict[str, trackio.Run] = {}
        self._context = Context()

    def begin(self, adapter: str, known: str | None, config: Mapping[str, Any]) -> str:
        """Goes on with the `known` run if it is the newest of its name: Trackio finds runs by name only."""
        run = self._init(adapter, config, resume="allow" if known else "never")
        if known and run.id != known:
            run.finish()
            run = self._init(adapter, config, resume="never")
        self._runs[adapter] = run
        return str(run.id)

    def _init(self, adapter: str, config: Mapping[str, Any], resume: str) -> trackio.Run:
        # else `init` ends the run before
        self._context.run(trackio.context_vars.current_run.set, None)
        return self._context.run(
            trackio.init,
            project=self._project,
            name=f"{self._group}/{adapter}",
            group=self._group,
            config=dict(config),
            resume=resume,
            embed=False,
            auto_log_cpu=False,  # every run would measure the same machine
            auto_log_gpu=False,
        )

    def log(self, adapter: str, values: Mapping[str, float], step: int) -> None:
        self._runs[adapter].log({**rewrite_logs(values), "train/global_step": step}, step=step)

    def end(self, adapter: str, state: str) -> None:
        self._runs.pop(adapter).finish()
