"""Writes a sweep's results in its run's folder: ``sweep.csv``, ``sweep.png`` and ``best``, a PEFT folder."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from mlora.config.sweep_config import SweepConfig
from mlora.files.disk import os_errors, sync_folder, write_file
from mlora.files.run_folder import RunFolder
from mlora.sweep.plot import plot_trials
from mlora.sweep.ranking import RankedTrial, rank_trials, shown_metrics


def write_outcome(folder: RunFolder, sweep: SweepConfig) -> None:
    """Writes the table, the plot and the best adapter, as far as there are trials."""
    trials = rank_trials(folder, sweep)
    write_file(folder.trials, _csv(trials, sweep).encode())
    if trials and trials[0].rank == 1:
        with os_errors(f"{folder.best}: cannot be saved"):
            _copy(folder.adapters / trials[0].name, folder.best)
    plot_trials(folder.trials_plot, trials, sweep)


def _csv(trials: Sequence[RankedTrial], sweep: SweepConfig) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["rank", "trial", "state", "step", *shown_metrics(sweep), "seconds", *sweep.space])
    for trial in trials:
        facts = [trial.rank, trial.name, trial.state, trial.step, *trial.metrics(sweep), trial.seconds]
        values = (trial.params.get(path) for path in sweep.space)
        writer.writerow([*facts, *(json.dumps(v) if isinstance(v, list | dict) else v for v in values)])
    return text.getvalue()


def _copy(source: Path, target: Path) -> None:
    """Copies a folder durably; the old target stays until the copy is complete.

    A process that is killed just between the two may leave no target; the next outcome mends it.
    """
    scratch, old = target.with_name(f".{target.name}.tmp"), target.with_name(f".{target.name}.old")
    for folder in (scratch, old):
        shutil.rmtree(folder, ignore_errors=True)
    scratch.mkdir()
    for file in source.iterdir():
        write_file(scratch / file.name, file.read_bytes())
    if target.exists():
        os.rename(target, old)
    os.rename(scratch, target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)
