"""Writes a sweep's results in its run's folder: ``sweep.csv``, ``sweep.png`` and ``best``, a PEFT folder."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlora.config.search_space import Choice, Leaf
from mlora.config.sweep_config import SweepConfig
from mlora.durable import sync_path, temporary
from mlora.store.disk import os_errors, write_file
from mlora.store.loss_plot import add_legend, make_panels, save_figure
from mlora.store.run_folder import RunFolder
from mlora.sweep.ranking import RankedTrial, rank_trials, shown_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_COLORS = {"finished": "tab:blue", "pruned": "tab:orange"}
_LONGEST = 18  # letters that are shown of a choice
_WIDE = 20  # ratio of the largest to the smallest loss above which the axis is logarithmic


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
    scratch, old = temporary(target), temporary(target)
    scratch.mkdir()
    for file in source.iterdir():
        write_file(scratch / file.name, file.read_bytes())
    if target.exists():
        os.rename(target, old)
    os.rename(scratch, target)
    sync_path(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def plot_trials(path: Path, trials: Sequence[RankedTrial], sweep: SweepConfig) -> None:
    """Draws ranked trials into a PNG file."""
    figure, panels = make_panels(1 + len(sweep.space), 4.2, 3.2)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.4)
    _curves(panels[0], trials)
    for axes, (name, leaf) in zip(panels[1:], sweep.space.items(), strict=True):
        _parameter(axes, name, leaf, trials, sweep.metric)
    add_legend(figure, panels)
    save_figure(path, figure)


def _kind(trial: RankedTrial) -> tuple[str, str]:
    """Returns a trial's color and label."""
    if trial.rank == 1:
        return "tab:red", f"best: {trial.name}"
    if trial.state in _COLORS:
        return _COLORS[trial.state], trial.state
    return "tab:gray", "others"


def _curves(axes: Axes, trials: Sequence[RankedTrial]) -> None:
    for trial in reversed(trials):  # the best on top
        if trial.curve:
            color, label = _kind(trial)
            width, alpha = (2.0, 1.0) if trial.rank == 1 else (1.0, 0.5)
            steps, losses = zip(*trial.curve, strict=True)
            axes.plot(
                steps, losses, "o-", color=color, label=label, markersize=3, linewidth=width, alpha=alpha
            )
    every = [loss for trial in trials for _, loss in trial.curve]
    if every and 0 < _WIDE * min(every) < max(every):
        axes.set_yscale("log")
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("optimizer step", fontsize=9)
    axes.set_ylabel("eval_loss", fontsize=9)


def _parameter(axes: Axes, name: str, leaf: Leaf, trials: Sequence[RankedTrial], metric: str) -> None:
    choices = leaf.values if isinstance(leaf, Choice) else {}
    for trial in reversed(trials):
        value: Any = trial.params.get(name)
        if trial.value is None or name not in trial.params or (metric != "eval_loss" and not trial.rank):
            continue
        color, label = _kind(trial)
        place = list(choices.values()).index(value) if choices else value
        size = 60 if trial.rank == 1 else 25
        axes.scatter([place], [trial.value], s=size, color=color, alpha=0.8, label=label)
    if isinstance(leaf, Choice):
        half = _LONGEST // 2  # values often begin alike
        texts = [text if len(text) <= _LONGEST else f"{text[:half]}…{text[-half:]}" for text in choices]
        axes.set_xticks(range(len(texts)), texts, rotation=20 if sum(map(len, texts)) > 40 else 0)
        axes.set_xlim(-0.5, len(texts) - 0.5)
    elif leaf.log:
        axes.set_xscale("log")
    axes.set_xlabel(name, fontsize=9)
    axes.set_ylabel(metric, fontsize=9)
