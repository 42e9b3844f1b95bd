"""The figure of `scale.py`: efficiency by depth, throughput by devices, bubbles by adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.figures import figure

Rows = Sequence[Mapping[str, Any]]
LINES: tuple[dict[str, Any], ...] = (
    {"color": "tab:green", "linewidth": 6, "alpha": 0.35},  # NVLink and InfiniBand often coincide
    {"color": "tab:blue", "linewidth": 1.6},
    {"color": "tab:orange", "linewidth": 1.6},
    {"color": "tab:red", "linewidth": 1.6},
)


def plot(data: Mapping[str, Any], path: Path) -> None:
    """Draw the results.

    Args:
        data: what `scale.json` holds.
        path: of the PNG.
    """
    with figure(path, 2, 2, dpi=110, figsize=(12, 8.4), layout="constrained") as (drawn, axes):
        models = list(dict.fromkeys(row["model"] for row in data["pipelines"]))
        for place, model in zip(axes[0], models, strict=True):
            handles = _depth(place, [row for row in data["pipelines"] if row["model"] == model], model)
        below = {"loc": "outside lower center", "ncols": len(handles)}
        drawn.legend(handles=handles, fontsize=8, frameon=False, **below)
        _devices(axes[1][0], data["layouts"], models)
        _lengths(axes[1][1], data["lengths"])
        assumed = data["assumed"]
        drawn.suptitle(
            f"Simulated, not measured: {data['command']}; micro-batches of {assumed['rows']} tokens, "
            f"{assumed['flops_per_second'] / 1e12:.0f} TFLOP/s a device assumed",
            fontsize=10,
        )


def _depth(axes: Any, rows: Rows, model: str) -> list[Any]:
    """Efficiency against stages, a line for each network, dotted with only as many adapters as stages.

    Returns:
        What a legend needs.
    """
    for line, name in zip(LINES, dict.fromkeys(row["network"] for row in rows), strict=True):
        own = [row for row in rows if row["network"] == name]
        depths = [row["stages"] for row in own]
        axes.plot(depths, [row["efficiency"] for row in own], "o-", label=name, markersize=4, **line)
        few = [row["efficiency_with_D_adapters"] for row in own]
        axes.plot(depths, few, ":", color=line["color"], linewidth=1.2)
        for row in own:
            if name == "InfiniBand":
                place = (row["stages"], row["efficiency"])
                axes.annotate(f"L={row['adapters']}", place, (0, 7), textcoords="offset points", fontsize=7)
    depths = sorted({row["stages"] for row in rows})
    bounds = [next(row["stage_bound"] for row in rows if row["stages"] == depth) for depth in depths]
    axes.plot(depths, bounds, "k--", linewidth=0.9, label="slowest stage")
    axes.plot([], [], "k:", linewidth=1.2, label="with L = D")
    axes.set_xscale("log", base=2)
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.set_xlabel("D, stages of one pipeline", fontsize=9)
    axes.set_ylabel("work / (devices x time)", fontsize=9)
    axes.set_ylim(0, 1.08)
    axes.set_title(f"{model}: one pipeline, adapters as needed (L at InfiniBand)", fontsize=9)
    axes.grid(alpha=0.3)
    axes.margins(x=0.08)
    return axes.get_legend_handles_labels()[0]


def _devices(axes: Any, rows: Rows, models: Sequence[str]) -> None:
    """Tokens per second against devices, the best layout of each."""
    networks = list(dict.fromkeys(row["network"] for row in rows))
    for model, style in zip(models, ("o-", "s--"), strict=True):
        for line, name in zip(LINES, networks, strict=True):
            own = [row for row in rows if (row["model"], row["network"]) == (model, name)]
            devices = sorted({row["devices"] for row in own})
            best = [max(r["tokens_per_second"] for r in own if r["devices"] == count) for count in devices]
            label = model if name == networks[1] else None
            axes.plot(devices, best, style, label=label, markersize=4, **line)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(devices, [str(count) for count in devices])
    axes.set_xlabel("devices, in pipelines that share nothing", fontsize=9)
    axes.set_ylabel("tokens/s", fontsize=9)
    axes.set_title("Throughput of the better layout", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _lengths(axes: Any, rows: Rows) -> None:
    """Bubble ratio against adapters per stage."""
    for latency, style in ((0.0, "o-"), (0.05, "s--")):
        own = [row for row in rows if row["latency"] == latency]
        each = [row["adapters"] / row["stages"] for row in own]
        for colour, name in (("tab:blue", "equal"), ("tab:red", "mixed")):
            what = "lengths ±50%" if name == "mixed" else "equal lengths"
            label = f"{what}, latency {latency:.0%} of T"
            axes.plot(each, [row[name] for row in own], style, color=colour, label=label, markersize=4)
    axes.set_xlabel("adapters per stage, D = 8", fontsize=9)
    axes.set_ylabel("steady bubble ratio", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.set_title("Adapters per stage", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
