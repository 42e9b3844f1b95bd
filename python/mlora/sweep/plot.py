"""Draws ``sweep.png``: losses of a sweep's trials over steps, and their metric over each parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlora.config.search_space import Choice, Leaf
from mlora.config.sweep_config import SweepConfig
from mlora.files.loss_plot import add_legend, save_figure
from mlora.sweep.ranking import RankedTrial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {"finished": "tab:blue", "pruned": "tab:orange"}
_BEST = "tab:red"
_LONGEST = 18  # letters that are shown of a choice
_WIDE = 20  # ratio of the largest to the smallest loss above which the axis is logarithmic


def plot_trials(path: Path, trials: Sequence[RankedTrial], sweep: SweepConfig) -> None:
    """Draws ranked trials into a PNG file."""
    from matplotlib.figure import Figure

    count = 1 + len(sweep.space)
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows + 0.4), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    _curves(panels[0], trials)
    for axes, (name, leaf) in zip(panels[1:], sweep.space.items(), strict=False):
        _parameter(axes, name, leaf, trials, sweep.metric)
    for axes in panels[count:]:
        axes.set_visible(False)
    add_legend(figure, panels[:count])
    save_figure(path, figure)


def _kind(trial: RankedTrial) -> tuple[str, str]:
    """Returns a trial's color and label."""
    if trial.rank == 1:
        return _BEST, f"best: {trial.name}"
    if trial.state in _COLORS:
        return _COLORS[trial.state], trial.state
    return "tab:gray", "others"


def _curves(axes: Axes, trials: Sequence[RankedTrial]) -> None:
    for trial in reversed(trials):  # the best on top
        if trial.curve:
            color, label = _kind(trial)
            best = trial.rank == 1
            axes.plot(
                *zip(*trial.curve, strict=True),
                "o-",
                color=color,
                label=label,
                markersize=3,
                linewidth=2.0 if best else 1.0,
                alpha=1.0 if best else 0.5,
            )
    losses = [loss for trial in trials for _, loss in trial.curve]
    if losses and 0 < _WIDE * min(losses) < max(losses):
        axes.set_yscale("log")
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("optimizer step", fontsize=9)
    axes.set_ylabel("eval_loss", fontsize=9)
    _finish(axes)


def _parameter(axes: Axes, name: str, leaf: Leaf, trials: Sequence[RankedTrial], metric: str) -> None:
    texts = list(leaf.values) if isinstance(leaf, Choice) else []
    values = list(leaf.values.values()) if isinstance(leaf, Choice) else []
    for trial in reversed(trials):
        value = trial.params.get(name)
        if trial.value is None or name not in trial.params or (metric != "eval_loss" and not trial.rank):
            continue
        color, label = _kind(trial)
        place = float(values.index(value) if values else value)  # type: ignore[arg-type]
        size = 60 if trial.rank == 1 else 25
        axes.scatter([place], [trial.value], s=size, color=color, alpha=0.8, label=label)
    if isinstance(leaf, Choice):
        half = _LONGEST // 2  # values often begin alike
        shown = [text if len(text) <= _LONGEST else f"{text[:half]}…{text[-half:]}" for text in texts]
        crowded = sum(map(len, shown)) > 40
        axes.set_xticks(range(len(texts)), shown, rotation=20 if crowded else 0)
        axes.set_xlim(-0.5, len(texts) - 0.5)
    elif leaf.log:
        axes.set_xscale("log")
    axes.set_xlabel(name, fontsize=9)
    axes.set_ylabel(metric, fontsize=9)
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
