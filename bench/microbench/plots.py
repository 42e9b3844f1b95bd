"""One figure of a result: ratios of the linears, adapters, ablation; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shared.figures import about, figure

from microbench.entries import FROZEN

Rows = Sequence[Mapping[str, Any]]


def plot(data: Mapping[str, Any], path: Path) -> bool:
    """Draw what a result holds.

    Args:
        data: what `suite.json` holds.
        path: of the PNG.

    Returns:
        False, and nothing is written, where there is nothing to draw or matplotlib is missing.
    """
    if find_spec("matplotlib") is None:
        return False
    rows = {name: [r for r in data["rows"] if r["section"] == name] for name in _PANELS}
    panels = [(draw, found) for name, found in rows.items() if found for draw in _PANELS[name]]
    if data["settings"]["device"] == "cpu":
        panels = [panel for panel in panels if panel[0] is not _share]
    if not panels:
        return False
    processor = "processor" if data["settings"]["device"] == "cpu" else "gpu"
    title = about(data["machine"], quick=data["settings"]["quick"], processor=processor)
    options = {"figsize": (10, 3.6 * len(panels)), "squeeze": False}
    with figure(path, len(panels), dpi=110, **options) as (drawn, axes):
        for (draw, found), place in zip(panels, axes[:, 0], strict=True):
            draw(place, found)
        drawn.suptitle(title, fontsize=9)
        drawn.tight_layout(rect=(0, 0, 1, 0.99))
    return True


def _ratios(axes: Any, rows: Rows) -> None:
    """Bars of time over frozen by layer; a black line at the computed limit."""
    labels = [
        f"{row['name']}, {row['layout']}\n{row['rows']} rows, N={row['adapters']}, {row['dtype']}"
        for row in rows
    ]
    names = _names(rows, without=FROZEN)
    _bars(axes, rows, names, "ratio_to_frozen", 1.0)
    for index, row in enumerate(rows):
        if "ratio_to_frozen" in row["limit"]:
            axes.plot([index - 0.4, index + 0.4], [row["limit"]["ratio_to_frozen"]] * 2, "k--", linewidth=1)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.plot([], [], "k--", linewidth=1, label="computed limit")
    slanted = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if len(labels) > 6 else {}
    axes.set_xticks(range(len(labels)), labels, fontsize=6, **slanted)
    axes.set_ylabel("forward + backward / frozen")
    axes.set_title("Linear layers", fontsize=9)
    axes.legend(fontsize=6)


def _time(axes: Any, rows: Rows) -> None:
    """Time against the number of adapters."""
    _curves(axes, rows, "seconds", 1e3)
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.set_title(f"Time, {rows[0]['name']}, {rows[0]['rows']} rows in all", fontsize=9)


def _launches(axes: Any, rows: Rows) -> None:
    """Launches against the number of adapters: operator calls on a CPU."""
    key = "launches" if "launches" in next(iter(rows[0]["contenders"].values())) else "operator_calls"
    _curves(axes, rows, key, 1)
    axes.set_yscale("log", base=2)
    axes.set_ylabel({"launches": "launches", "operator_calls": "operator calls (CPU)"}[key])
    axes.set_title("Launches", fontsize=9)


def _share(axes: Any, rows: Rows) -> None:
    """Share of wall time in which no kernel runs, against the number of adapters, on a GPU."""
    _curves(axes, rows, "launch_share", 1)
    axes.set_ylim(0, 1)
    axes.set_ylabel("1 - kernel time / wall time")
    axes.set_title("Share of time in launches", fontsize=9)


def _curves(axes: Any, rows: Rows, key: str, factor: float) -> None:
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        for name in _names(rows):
            points = [
                (row["adapters"], factor * row["contenders"][name][key])
                for row in rows
                if row["dtype"] == dtype and key in row["contenders"].get(name, {})
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=f"{name}, {dtype}")
    numbers = sorted({row["adapters"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.set_xlabel("adapters")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=6)


def _ablation_time(axes: Any, rows: Rows) -> None:
    _bars(axes, rows, _names(rows), "seconds", 1e3)
    _finish(axes, rows, "ms", "With and without in-place scatter: time")


def _ablation_memory(axes: Any, rows: Rows) -> None:
    _bars(axes, rows, _names(rows), "peak_bytes", 2**-20)
    _finish(axes, rows, "MiB", "With and without in-place scatter: peak memory")


def _finish(axes: Any, rows: Rows, unit: str, title: str) -> None:
    labels = [f"{row['name']}\nN={row['adapters']}, {row['dtype']}" for row in rows]
    axes.set_xticks(range(len(labels)), labels, fontsize=6)
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=6)


def _bars(axes: Any, rows: Rows, names: Sequence[str], key: str, factor: float) -> None:
    """Groups of bars, a group for each row; a contender that a row lacks leaves a gap."""
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        points = [
            (place + width * (number - (len(names) - 1) / 2), factor * row["contenders"][name][key])
            for place, row in enumerate(rows)
            if name in row["contenders"]
        ]
        bars = axes.bar(*zip(*points, strict=True), width, label=name)
        if len(rows) * len(names) <= 48:
            axes.bar_label(bars, fmt="%.3g", fontsize=5)


def _names(rows: Rows, without: str = "") -> list[str]:
    return [name for name in dict.fromkeys(n for row in rows for n in row["contenders"]) if name != without]


_PANELS = {
    "linears": [_ratios],
    "adapters": [_time, _launches, _share],
    "ablation": [_ablation_time, _ablation_memory],
}
