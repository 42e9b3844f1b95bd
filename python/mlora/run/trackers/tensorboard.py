"""TensorBoard: a folder of event files for each adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from transformers.integrations.integration_utils import rewrite_logs

from mlora.run.trackers.tracker import TrackedGroup, Tracker


class TensorBoardTracker(Tracker):
    """Writes to ``<logging_dir>/<adapter>``, under the names of Transformers' ``TensorBoardCallback``."""

    def __init__(self, group: TrackedGroup) -> None:
        self._folder, self.place = group.logging_dir, str(group.logging_dir)
        self._writers: dict[str, SummaryWriter] = {}

    def begin(self, adapter: str, known: str | None, config: Mapping[str, Any]) -> str:
        """Opens a new event file; a new tracking run hides older files of the folder."""
        purge = None if known else 0
        writer = SummaryWriter(str(self._folder / adapter), purge_step=purge)
        self._writers[adapter] = writer
        writer.add_text("args", f"```\n{json.dumps(config, indent=2, default=str)}\n```")
        return adapter

    def log(self, adapter: str, values: Mapping[str, float], step: int) -> None:
        writer = self._writers[adapter]
        for key, value in rewrite_logs(values).items():
            writer.add_scalar(key, value, step)
        writer.flush()

    def end(self, adapter: str, state: str) -> None:
        self._writers.pop(adapter).close()
