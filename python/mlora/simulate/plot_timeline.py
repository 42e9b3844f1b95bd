"""Draws a pipeline's timeline, simulated or measured: one row per stage, one colour per stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from mlora.pipeline.actions import ActionType
from mlora.simulate.measures import Window, busy_shares
from mlora.simulate.timeline import EVALUATION, OPTIMIZER, Event, Timeline, as_events
from mlora.store.loss_plot import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Colour = tuple[float, float, float]

FEW_STREAMS = 9
IDLE = "#ededed"
OTHERS = {OPTIMIZER: ("#222222", "optimizer step"), EVALUATION: ("#8d7b68", "evaluation")}


def plot_timeline(
    path: Path,
    timeline: Timeline,
    title: str,
    *,
    window: Window | None = None,
    until: float | None = None,
) -> None:
    """Draws the work of each stage over time into a PNG file, and how much of the window each one works.

    Args:
        window: the steady window.
        until: seconds at which the picture ends; default: with the last event.

    Raises:
        RunError: the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    events, stages = timeline.events, timeline.stages
    whole = Window(float(events["begin"].min()), float(events["end"].max()))
    first, end = whole.begin, whole.end if until is None else until
    shown = [
        event._replace(begin=event.begin - first, end=event.end - first)
        for event in as_events(events[events["begin"] < end])
    ]
    streams = np.unique(events["stream"]).tolist()
    colours = _colours(streams)
    figure = Figure(figsize=(13, min(1.6 + 0.42 * stages, 8.5)), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10, loc="left", pad=18 if window else 6)
    axes.set_xlabel("time", fontsize=9)
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    axes.set_xlim(0, end - first)
    axes.set_ylim(stages - 0.4, -0.6)
    ticks = range(0, stages, max(1, stages // 16))
    axes.set_yticks(ticks, [f"stage {stage}" for stage in ticks], fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    _bars(axes, shown, stages, colours)
    if stages <= 16:
        _numbers(axes, shown, len(streams))
    if stages <= 40:
        for stage, share in enumerate(busy_shares(timeline, window or whole)):
            side = axes.get_yaxis_transform()
            axes.text(1.005, stage, f"{share:.0%}", transform=side, fontsize=8, va="center")
        axes.text(1.005, 1.01, "busy", transform=axes.transAxes, fontsize=8, va="bottom")
    if window:
        _mark(axes, window.begin - first, window.end - first)
    _legend(axes, colours, {event.kind for event in shown})
    save_figure(path, figure)


def _colours(streams: Sequence[int]) -> dict[int, Colour]:
    from matplotlib import colormaps

    if len(streams) <= FEW_STREAMS:
        colours = [colormaps["tab10"](index)[:3] for index in range(10) if index != 7]  # idle is grey
        return dict(zip(streams, colours, strict=False))
    wheel = colormaps["turbo"]
    return {s: wheel(0.08 + 0.84 * index / (len(streams) - 1))[:3] for index, s in enumerate(streams)}


def _shade(colour: Colour, kind: str) -> Colour | str:
    """Returns the colour of a bar: light for forwards, full for backwards."""
    if kind in OTHERS:
        return OTHERS[kind][0]
    if kind == ActionType.BACKWARD:
        return colour
    red, green, blue = (1 - 0.45 * (1 - part) for part in colour)
    return red, green, blue


def _bars(axes: Axes, events: Sequence[Event], stages: int, colours: Mapping[int, Colour]) -> None:
    """Draws a row for each stage, grey while it is idle."""
    height = 0.78 if stages <= 40 else 1.0
    for stage in range(stages):
        own, place = [event for event in events if event.stage == stage], (stage - height / 2, height)
        axes.broken_barh([(0, axes.get_xlim()[1])], place, facecolor=IDLE, zorder=1)
        axes.broken_barh(
            [(event.begin, event.end - event.begin) for event in own],
            place,
            facecolors=[_shade(colours[event.stream], event.kind) for event in own],
            edgecolor="white",
            linewidth=0.4 if len(own) <= 200 and stages <= 40 else 0,
            zorder=2,
        )


def _numbers(axes: Axes, events: Sequence[Event], streams: int) -> None:
    """Writes into each bar its stream, or its micro-batch if there is only one stream."""
    width = axes.get_xlim()[1]
    bars = [event for event in events if event.kind not in OTHERS]
    if not bars or median(event.end - event.begin for event in bars) < width / 110:
        return
    for event in bars:
        if event.end <= width:
            middle, text = (event.begin + event.end) / 2, event.stream if streams > 1 else event.micro_batch
            ink = "black" if event.kind == ActionType.FORWARD else "white"
            axes.text(middle, event.stage, str(text), ha="center", va="center", fontsize=6.5, color=ink)


def _mark(axes: Axes, begin: float, end: float) -> None:
    """Marks the steady window with dashed lines."""
    width = axes.get_xlim()[1]
    for edge in (begin, end):
        if edge <= width:
            axes.axvline(edge, color="black", linestyle=(0, (4, 3)), linewidth=1.1, zorder=3)
    if begin < width:
        text = " steady window →" if end > width else " steady window"
        axes.text(begin, 1.01, text, transform=axes.get_xaxis_transform(), fontsize=8, va="bottom")


def _legend(axes: Axes, colours: Mapping[int, Colour], kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    grey = (0.35, 0.35, 0.35)
    handles = [
        Patch(color=_shade(grey, ActionType.FORWARD), label="forward (light)"),
        Patch(color=grey, label="backward (full)"),
        *(Patch(color=colour, label=label) for kind, (colour, label) in OTHERS.items() if kind in kinds),
        Patch(color=IDLE, label="idle"),
    ]
    streams = list(colours)
    if len(streams) == 1:
        handles.append(Patch(color=colours[streams[0]], label="numbers: micro-batches"))
    else:
        for stream in streams if len(streams) <= FEW_STREAMS else (streams[0], streams[-1]):
            handles.append(Patch(color=colours[stream], label=f"stream {stream}"))
    axes.figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 8), fontsize=7.5, frameon=False
    )
