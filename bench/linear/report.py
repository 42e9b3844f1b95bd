"""The table and the figure of one linear layer, and what in them is missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.figures import figure
from shared.results import cell

SLOWER = 1.03
"""How much slower than a loop without dropout ours may be, with dropout."""
HEADER = (
    f"{'T x d_in x d_out, N':23} {'dtype':8} | {'frozen ms':>9} {'gemm ms':>8} {'ours ms':>8} | "
    f"{'PEFT':>5} {'addmm_':>6} {'p=0':>5} {'ours':>5} {'held':>5} {'packed':>6} {'must':>5} {'1st':>5} "
    f"{'fp32 A,B':>8} | "
    f"{'ours/gemm':>9} {'added ms':>8} {'limit ms':>8} {'MB':>5} {'GFLOP':>5}"
)


def line(row: dict[str, Any]) -> str:
    """A row as text; ratios are to the frozen layer unless they say otherwise."""
    rows, d_in, d_out, adapters = row["shape"]
    ms = {name: 1e3 * value for name, value in row["seconds"].items()}
    ratio, least = row["ratio_to_frozen"], row["limit"]
    mixed, packed = cell(ratio.get("ours_fp32_adapters"), "8.3f"), cell(ratio.get("ours_packed"), "6.3f")
    must = cell(row["must"], "5.2f")
    name = f"{rows} x {d_in} x {d_out}, {adapters}"
    return (
        f"{name:23} {row['dtype']:8} | {ms['frozen']:9.2f} {ms['gemm']:8.2f} "
        f"{ms['ours']:8.2f} | {ratio['peft']:5.2f} {ratio['addmm']:6.2f} "
        f"{ratio['addmm_without_dropout']:5.2f} {ratio['ours']:5.3f} {ratio['ours_held']:5.3f} "
        f"{packed} {must} {row['first_call_ratio_to_frozen']['ours']:5.3f} {mixed} | "
        f"{row['ours_to_gemm']:9.3f} {1e3 * row['added_seconds']:8.2f} {1e3 * least['seconds']:8.2f} "
        f"{least['bytes'] / 1e6:5.0f} {least['flops'] / 1e9:5.2f}"
    )


def busy(rows: list[dict[str, Any]]) -> float:
    """Processor seconds per wall second, worst case; PEFT's loop leaves processors idle by itself."""
    return min(value for row in rows for name, value in row["processors"].items() if name != "peft")


def faults(rows: list[dict[str, Any]], threads: int) -> list[str]:
    """Why these results do not show what they should; the processors idle where something else had them."""
    missed = [
        f"missed: {named(row)}, must be {row['must']:.2f}"
        for row in rows
        if row["must"] and row["ratio_to_frozen"]["ours"] > row["must"]
    ]
    missed += [
        f"slower than the loop of addmm_ without dropout: {named(row)}, the loop {loop:.3f}"
        for row in rows
        if (loop := row["ratio_to_frozen"].get("addmm_without_dropout"))
        and min(row["ratio_to_frozen"][key] for key in ("ours", "ours_held")) > SLOWER * loop
    ]
    disturbed = busy(rows) <= 0.9 * threads
    return missed + (["SOMETHING ELSE RAN: do not trust this"] if disturbed else [])


def ours(row: dict[str, Any]) -> dict[str, float]:
    """Our ratios to the frozen layer: in any loop, with held gradients, with packed weights."""
    names = {"ours": "plain", "ours_held": "held", "ours_packed": "packed"}
    return {
        label: row["ratio_to_frozen"][key] for key, label in names.items() if key in row["ratio_to_frozen"]
    }


def named(row: dict[str, Any]) -> str:
    """The row and its ratios in words."""
    ratios = ", ".join(f"{label} {ratio:.3f}" for label, ratio in ours(row).items())
    return f"{'x'.join(map(str, row['shape']))} {row['dtype']}: {ratios} of the frozen layer's time"


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Bars of the ratio to the frozen layer."""
    names = {
        "peft": "PEFT loop",
        "addmm": "addmm_ loop",
        "gemm": "chosen GEMM, no adapters",
        "ours": "ours",
        "ours_held": "ours, gradients held",
        "ours_packed": "ours, packed weight",
    }
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    options = {"figsize": (9, 3.2 * len(dtypes)), "squeeze": False}
    with figure(path, len(dtypes), dpi=120, **options) as (drawn, panels):
        for dtype, axes in zip(dtypes, panels[:, 0], strict=True):
            _bars(axes, [row for row in rows if row["dtype"] == dtype], names)
            axes.set_ylabel(f"time / frozen F.linear, {dtype}")
        panels[0, 0].legend(fontsize=8)
        panels[0, 0].set_title(title, fontsize=9)
        drawn.tight_layout()


def _bars(axes: Any, rows: list[dict[str, Any]], names: dict[str, str]) -> None:
    for index, (key, label) in enumerate(names.items()):
        places = [i + 0.14 * (index - 2.5) for i in range(len(rows))]
        bars = axes.bar(places, [row["ratio_to_frozen"].get(key, 0) for row in rows], 0.14, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=6)
    for i, row in enumerate(rows):
        if row["must"]:
            axes.plot([i + 0.08, i + 0.4], [row["must"]] * 2, color="black", linewidth=1)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(rows)), ["x".join(map(str, row["shape"])) for row in rows], fontsize=8)
