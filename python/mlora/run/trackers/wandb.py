"""Weights & Biases: a run for each adapter, in one group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wandb
from transformers.integrations.integration_utils import rewrite_logs

from mlora.run.trackers.tracker import TrackedGroup, Tracker


class WandbTracker(Tracker):
    """Logs under the names of Transformers' ``WandbCallback``, with ``train/global_step`` as the x axis.

    Raises:
        RuntimeError: nobody has logged in, and wandb is not offline.
    """

    def __init__(self, group: TrackedGroup) -> None:
        mine = wandb.setup().settings
        if mine.mode not in ("offline", "disabled") and not wandb.login():
            raise RuntimeError("no API key; run `wandb login`, or `wandb offline` to write files only")
        self._group, self._project = group.name, group.project or mine.project or "huggingface"
        self.place = f"project {self._project}, group {self._group}"
        self._runs: dict[str, wandb.Run] = {}

    def begin(self, adapter: str, known: str | None, config: Mapping[str, Any]) -> str:
        run = wandb.init(
            project=self._project,
            group=self._group,
            name=adapter,
            id=known,
            resume="allow" if known else None,
            reinit="create_new",
            config=dict(config),
            # several runs would each take over the output of this process
            settings=wandb.Settings(console="off", silent=True),
        )
        run.define_metric("train/global_step")
        run.define_metric("*", step_metric="train/global_step", step_sync=True)
        self._runs[adapter] = run
        return str(run.id)

    def log(self, adapter: str, values: Mapping[str, float], step: int) -> None:
        self._runs[adapter].log({**rewrite_logs(values), "train/global_step": step})

    def end(self, adapter: str, state: str) -> None:
        self._runs.pop(adapter).finish(exit_code=0 if state == "finished" else 1)
