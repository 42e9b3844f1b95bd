"""Reads the files of a run's folder into plain data for its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlora.report.history import AdapterHistory, History, read_history
from mlora.report.timeline import RunTimeline, read_timeline
from mlora.store.disk import os_errors
from mlora.store.run_folder import RunFolder, metrics_of
from mlora.store.samples import read_samples


@dataclass(frozen=True)
class Adapter:
    """An adapter of a run.

    Args:
        entry: as `mlora status --json` has it.
        config: its fields as resolved; empty if the run's files do not have them any more.
        history: what the run measured of it.
        samples: answers to a few held-out prompts, by the step at which they were given.
    """

    name: str
    entry: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    history: AdapterHistory = field(default_factory=AdapterHistory)
    samples: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """Everything that a report shows.

    Args:
        path: the run's folder.
        status: as `mlora status --json` has it.
        next: how to go on with a run that has not ended, as a line; else empty.
        config: the values of ``config.yaml``. They are not checked: files that they name may be gone.
        config_text: ``config.yaml``.
        starts: ``environment.json``: the first start, then each resume.
        ended: when the run or its last part ended; None while it is at work, or if it was killed.
        read: when its files were read.
        seconds: wall time, as far as the files tell.
        limit: ``scheduler.memory_limit`` in bytes.
        memory: in bytes, as the run has published it; None without a limit.
        shown: the objectives' metrics that tables show: their titles, and how a value is written.
        timeline: of the pipeline; None if the run was not traced.
    """

    path: str
    status: str
    next: str
    config: Mapping[str, Any]
    config_text: str
    starts: Sequence[Mapping[str, Any]]
    ended: datetime | None
    read: datetime
    seconds: float
    adapters: Sequence[Adapter]
    history: History
    limit: int | None = None
    memory: Mapping[str, int] | None = None
    shown: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    timeline: RunTimeline | None = None

    @property
    def base(self) -> str:
        """The base model's name, without its folder."""
        return Path(self.config["base_model"]).name


def read_run(
    folder: RunFolder,
    status: Mapping[str, Any],
    *,
    line: str,
    config: Mapping[str, Any],
    fields: Mapping[str, Mapping[str, Any]],
    limit: int | None,
    shown: Mapping[str, tuple[str, str]],
) -> Run:
    """Reads a run's files while it trains or afterwards.

    Args:
        folder: the run's folder.
        status: what `mlora status --json` prints.
        line: what `mlora status` prints first.
        config: the values of ``config.yaml``.
        fields: the resolved fields of each adapter.
        limit, shown: as in `Run`.

    Raises:
        RunError: a file cannot be read, or is not what its name says.
    """
    history = read_history(metrics_of(folder.metrics))
    samples: dict[str, dict[int, Any]] = {}
    for record in read_samples(folder.samples):
        samples.setdefault(record["adapter"], {})[record["step"]] = record["samples"]
    adapters = [
        Adapter(
            name := entry["name"],
            entry,
            fields.get(name, {}),
            history.adapters.get(name, AdapterHistory()),
            samples.get(name, {}),
        )
        for entry in status["tasks"]
    ]
    with os_errors(f"{folder.config}: cannot be read"):
        text = folder.config.read_text(encoding="utf-8")
    summary = folder.read_summary()
    over = summary is not None and summary["status"] != "running" and status["status"] != "running"
    return Run(
        path=str(folder.path),
        status=status["status"],
        next=line if status["status"] in ("interrupted", "paused") else "",
        config=config,
        config_text=text,
        starts=folder.read_environment(),
        ended=datetime.fromtimestamp(folder.summary.stat().st_mtime, UTC) if over else None,
        read=datetime.now(UTC),
        seconds=summary["seconds"] if summary and over else history.seconds,
        adapters=adapters,
        history=history,
        limit=limit,
        memory=status["memory"],
        shown=shown,
        timeline=read_timeline(folder.path / "trace.json"),
    )
