"""``loss.png``: the losses of a run, one panel for each adapter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlora.store.disk import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_losses(path: Path, names: Sequence[str], records: Sequence[dict[str, Any]]) -> None:
    """Draws lines of ``metrics.jsonl``, one panel for each of `names`; without names, writes no file."""
    if not names:
        return
    figure, panels = make_panels(len(names), 3.2, 2.4)
    figure.set_size_inches(np.maximum(figure.get_size_inches(), (6, 4)))
    for name, axes in zip(names, panels, strict=True):
        _panel(axes, name, [record for record in records if record["adapter"] == name])
    figure.supxlabel("optimizer step", fontsize=10)
    figure.supylabel("loss per trained token", fontsize=10)
    add_legend(figure, panels)
    save_figure(path, figure)


def make_panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Returns a figure of `count` panels, about as many in a row as in a column; sizes are inches of one."""
    from matplotlib.figure import Figure

    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axes in panels:
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, panels[:count]


def add_legend(figure: Figure, panels: Iterable[Axes]) -> None:
    """Puts one legend above all panels."""
    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(
            handles.values(), handles.keys(), loc="outside upper right", ncols=4, fontsize=8, frameon=False
        )


def save_figure(path: Path, figure: Figure) -> None:
    """Writes a figure as PNG; the file is either whole or as it was."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    write_file(path, FigureCanvasAgg(figure).print_png)


def _panel(axes: Axes, name: str, records: Sequence[dict[str, Any]]) -> None:
    trained = [(record["step"], record["loss"]) for record in records if "loss" in record]
    evaluated = [(record["step"], record["eval_loss"]) for record in records if "eval_loss" in record]
    if trained:
        steps, losses = zip(*trained, strict=True)
        axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="training")
        axes.plot(steps, smooth(losses), color="tab:blue", linewidth=1.4, label="training, smoothed")
    if evaluated:
        steps, losses = zip(*evaluated, strict=True)
        axes.plot(steps, losses, "o-", color="tab:orange", markersize=3, linewidth=1, label="evaluation")
    axes.set_title(name if len(name) <= 30 else f"{name[:29]}…", fontsize=9)
    axes.set_ylim(bottom=0)


def smooth(values: Sequence[float]) -> np.ndarray:
    """Returns the mean of each value and its neighbours, a fortieth of all values on either side."""
    window = np.ones(2 * (len(values) // 40) + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")
