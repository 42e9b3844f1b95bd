"""Draws a pipeline's timeline, simulated or measured: one row per stage, one colour per stream."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from mlora.files.loss_plot import save_figure
from mlora.pipeline.actions import ActionType
from mlora.simulate.timeline import EVALUATION, OPTIMIZER, Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEW_STREAMS = 9
_LONGEST_NAME = 22  # characters of a stream's name
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
IDLE = "#ededed"
OTHERS = {OPTIMIZER: ("#222222", "optimizer step"), EVALUATION: ("#8d7b68", "evaluation")}


def plot_timeline(
    path: Path,
    events: Sequence[Event],
    title: str,
    *,
    window: tuple[float, float] | None = None,
    until: float | None = None,
    names: Sequence[str] = (),
) -> None:
    """Draws the work of each stage over time into a PNG file.

    Args:
        events: work of stages, in any order; at least one.
        window: the steady window, in seconds.
        until: seconds at which the picture ends; default: with the last event.
        names: the streams' names, by number; default: the numbers.

    Raises:
        RunError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    first = min(event.begin for event in events)
    end = max(event.end for event in events) if until is None else until
    scale, unit = next((entry for entry in UNITS if end - first >= entry[0]), UNITS[-1])
    shown = [event for event in events if event.begin < end]
    stages = max(event.stage for event in events) + 1
    streams = sorted({event.stream for event in events})
    size = (13, min(1.6 + 0.42 * stages, 8.5))
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10, loc="left", pad=18 if window else 6)
    axes.set_xlabel(f"time, {unit}", fontsize=9)
    axes.set_xlim(0, (end - first) / scale)
    colours = _colours(streams)
    moved = [e._replace(begin=(e.begin - first) / scale, end=(e.end - first) / scale) for e in shown]
    for stage in range(stages):
        _row(axes, stage, [event for event in moved if event.stage == stage], colours, stages)
    if stages <= 16:
        _numbers(axes, moved, len(streams))
    _frame(axes, stages)
    _busy(axes, events, window or (first, max(event.end for event in events)), stages)
    if window:
        _mark(axes, (window[0] - first) / scale, (window[1] - first) / scale)
    labels = {stream: _label(stream, names) for stream in streams}
    _legend(axes, labels, colours, {event.kind for event in shown})
    save_figure(path, figure)


def _colours(streams: Sequence[int]) -> dict[int, tuple[float, float, float]]:
    from matplotlib import colormaps

    if len(streams) <= FEW_STREAMS:
        colours = [colormaps["tab10"](index)[:3] for index in range(10) if index != 7]  # idle is grey
        return dict(zip(streams, colours, strict=False))
    wheel = colormaps["turbo"]
    return {s: wheel(0.08 + 0.84 * index / (len(streams) - 1))[:3] for index, s in enumerate(streams)}


def _shade(colour: tuple[float, float, float], kind: str) -> tuple[float, float, float] | str:
    """Returns the colour of a bar: light for forwards, full for backwards."""
    if kind in OTHERS:
        return OTHERS[kind][0]
    if kind == ActionType.BACKWARD:
        return colour
    red, green, blue = (1 - 0.45 * (1 - part) for part in colour)
    return red, green, blue


def _row(
    axes: Axes,
    stage: int,
    events: Sequence[Event],
    colours: dict[int, tuple[float, float, float]],
    stages: int,
) -> None:
    """Draws the row of a stage, grey while it is idle."""
    width = axes.get_xlim()[1]
    height = 0.78 if stages <= 40 else 1.0
    axes.broken_barh([(0, width)], (stage - height / 2, height), facecolor=IDLE, zorder=1)
    line = 0.4 if len(events) <= 200 and stages <= 40 else 0
    axes.broken_barh(
        [(event.begin, event.end - event.begin) for event in events],
        (stage - height / 2, height),
        facecolors=[_shade(colours[event.stream], event.kind) for event in events],
        edgecolor="white",
        linewidth=line,
        zorder=2,
    )


def _numbers(axes: Axes, events: Sequence[Event], streams: int) -> None:
    """Writes into each bar its stream, or its micro-batch if there is only one stream."""
    width = axes.get_xlim()[1]
    bars = [event for event in events if event.kind not in OTHERS]
    if not bars or median(event.end - event.begin for event in bars) < width / 110:
        return
    for event in bars:
        middle = (event.begin + event.end) / 2
        if event.end <= width:
            text = event.stream if streams > 1 else event.micro_batch
            ink = "black" if event.kind == ActionType.FORWARD else "white"
            axes.text(middle, event.stage, str(text), ha="center", va="center", fontsize=6.5, color=ink)


def _frame(axes: Axes, stages: int) -> None:
    axes.set_ylim(stages - 0.4, -0.6)
    ticks = range(0, stages, max(1, stages // 16))
    axes.set_yticks(ticks, [f"stage {stage}" for stage in ticks], fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _busy(axes: Axes, events: Sequence[Event], window: tuple[float, float], stages: int) -> None:
    """Writes at the right edge how much of the window each stage works."""
    if stages > 40:
        return
    busy = [0.0] * stages
    for event in events:
        busy[event.stage] += max(0.0, min(event.end, window[1]) - max(event.begin, window[0]))
    for stage, seconds in enumerate(busy):
        share = seconds / (window[1] - window[0])
        axes.text(1.005, stage, f"{share:.0%}", transform=axes.get_yaxis_transform(), fontsize=8, va="center")
    axes.text(1.005, 1.01, "busy", transform=axes.transAxes, fontsize=8, va="bottom")


def _mark(axes: Axes, begin: float, end: float) -> None:
    """Marks the steady window with dashed lines."""
    width = axes.get_xlim()[1]
    for edge in (begin, end):
        if edge <= width:
            axes.axvline(edge, color="black", linestyle=(0, (4, 3)), linewidth=1.1, zorder=3)
    if begin < width:
        text = "steady window →" if end > width else "steady window"
        axes.text(begin, 1.01, f" {text}", transform=axes.get_xaxis_transform(), fontsize=8, va="bottom")


def _label(stream: int, names: Sequence[str]) -> str:
    if not names:
        return f"stream {stream}"
    name = names[stream]
    return f"{stream}: {name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + '…'}"


def _legend(
    axes: Axes, labels: dict[int, str], colours: dict[int, tuple[float, float, float]], kinds: set[str]
) -> None:
    from matplotlib.patches import Patch

    grey = (0.35, 0.35, 0.35)
    handles = [
        Patch(color=_shade(grey, ActionType.FORWARD), label="forward (light)"),
        Patch(color=grey, label="backward (full)"),
        *(Patch(color=colour, label=label) for kind, (colour, label) in OTHERS.items() if kind in kinds),
        Patch(color=IDLE, label="idle"),
    ]
    streams = list(labels)
    if len(streams) == 1:
        handles.append(Patch(color=colours[streams[0]], label="numbers: micro-batches"))
    else:
        chosen = streams if len(streams) <= FEW_STREAMS else [streams[0], streams[-1]]
        handles += [Patch(color=colours[stream], label=labels[stream]) for stream in chosen]
    columns = min(len(handles), 8)
    axes.figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, fontsize=7.5, frameon=False
    )
