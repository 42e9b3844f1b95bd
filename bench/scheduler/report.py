"""What must be reached by the benchmark of the scheduler, and its results as text and figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.figures import about, figure

Data = Mapping[str, Any]
SCENES = {"all_fit": "all tasks fit", "some_wait": "some tasks wait"}
WAYS = {
    "seeded": "dry runs, then measurements",
    "unseeded": "the same fits, measurements alone",
    "paper": "one fit of the peak, measurements alone (the paper's)",
}


def must_lines(data: Data) -> list[dict[str, Any]]:
    """What was asked for, and what was found.

    Args:
        data: a result, of one part or both.

    Returns:
        Of each: `what`, `value`, `must`, the most that is allowed, `unit`, and whether it is `met`. Windowed
        models are not judged.
    """
    found = []
    if "overhead" in data:
        part = data["overhead"]
        for key, name in SCENES.items():
            found.append(_line(f"share of a step, {name}", 100 * part[key]["share"], 100 * part["must"]))
    if "prediction" in data:
        part = data["prediction"]
        for curve in part["curves"]:
            if curve["window"] is None:
                after = curve["ways"]["seeded"]["worst_mape"][part["judged_at"]]
                name = label(curve)
                found.append(
                    _line(f"MAPE after {part['judged_at']} points, {name}", after, part["must_mape"])
                )
                found.append(_line(f"worst shape by seeds, {name}", curve["seed_worst"], part["must_seed"]))
    return found


def _line(what: str, value: float, must: float) -> dict[str, Any]:
    return {"what": what, "value": value, "must": must, "unit": "%", "met": value <= must}


def label(curve: Data) -> str:
    """A model and its mode."""
    return f"{curve['name']}, {'recomputed' if curve['checkpointing'] else 'kept'}"


def text(data: Data) -> str:
    """A result in lines; one of `--quick` is not judged."""
    found = []
    if "overhead" in data:
        found += _overhead_lines(data["overhead"])
    if "prediction" in data:
        found += _prediction_lines(data["prediction"])
    found.append("")
    for line in [] if data["quick"] else must_lines(data):
        verdict = "met" if line["met"] else "MISSED"
        found.append(f"{verdict:6}  {line['what']}: {line['value']:.3g}% (must be at most {line['must']:g}%)")
    return "\n".join(found) + "\n"


def _overhead_lines(part: Data) -> list[str]:
    found = []
    for key, name in SCENES.items():
        one = part[key]
        found.append(
            f"{name}: {one['tasks_of_a_step']:.0f} tasks and {one['rows_of_a_step']:.0f} rows in a step of "
            f"{1e3 * one['step_seconds']:.0f} ms; before the first, {one['start_seconds']:.1f} s; "
            f"others took {one['other_processes_share']} of the machine"
        )
        for call, share in one["shares"].items():
            seconds = one["seconds"].get(call, share * one["step_seconds"])
            found.append(f"  {call:16} {1e6 * seconds:8.0f} us a step  {100 * share:6.3f}%")
        found.append(f"  {'together':16} {'':8}               {100 * one['share']:6.3f}%")
        parts = ", ".join(f"{call} {1e3 * value:.1f}" for call, value in one["decision_parts"].items())
        found.append(
            f"  a decision {1e3 * one['decision_seconds']:.1f} ms (ms of its calls: {parts}), "
            f"one in {one['iterations_for_each_decision']} steps"
        )
    both = part["all_fit"]
    learning = both["learning_steps_measured"]
    found.append(
        f"a measured step takes {both['measured_over_not']['median']:.2f} times another one "
        f"(+-{both['measured_over_not']['spread']:.2f}); the first {sum(learning)} are, "
        f"and the first {len(learning)} take "
        f"{both['learning_ratio']['median']:.2f} times those without a limit"
    )
    for name, ratio in both["over_no_limit"].items():
        found.append(f"{name} / no limit: {ratio['median']:.4f} (+-{ratio['spread']:.4f})")
    return found


def _prediction_lines(part: Data) -> list[str]:
    numbers = sorted({0, 1, 2, 5, 10, part["points"]} & set(range(part["points"] + 1)))
    found = ["", f"MAPE in percent after so many points: {', '.join(map(str, numbers))}"]
    for curve in part["curves"]:
        found.append(f"{label(curve)}: {min(curve['megabytes']):.1f} to {max(curve['megabytes']):.1f} MB")
        rows = {name: curve["ways"][name]["mape"] for name in WAYS}
        rows["seeded, equal lengths"] = curve["seeded_equal"]["mape"]
        for name, row in rows.items():
            cells = ["   -   " if row[n] is None else f"{row[n]:7.3f}" for n in numbers]
            found.append(f"  {name:22} {' '.join(cells)}")
    return found


def plot(data: Data, path: Path) -> None:
    """Draw the errors of predictions against the number of points, a panel for each way.

    Args:
        data: a result with predictions.
        path: of the PNG.
    """
    part = data["prediction"]
    options = {"figsize": (13, 4.6), "sharey": True, "layout": "constrained"}
    with figure(path, 1, len(WAYS), dpi=110, **options) as (drawn, axes):
        for place, (way, name) in zip(axes, WAYS.items(), strict=True):
            _errors(place, part["curves"], way)
            place.axhline(part["must_mape"], color="black", linestyle="--", linewidth=0.9)
            place.set_title(name, fontsize=9)
            place.set_xlabel("measured micro-batches", fontsize=9)
            place.set_xticks(range(0, 21, 5))
        axes[0].set_ylabel("MAPE on unseen shapes, %", fontsize=9)
        handles = axes[0].get_legend_handles_labels()[0]
        drawn.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
        drawn.suptitle(about(data["machine"], quick=data["quick"]), fontsize=9)


def _errors(axes: Any, curves: Sequence[Data], way: str) -> None:
    """A line for each model and mode; windowed models are dotted."""
    colours = {name: f"C{place}" for place, name in enumerate(dict.fromkeys(c["name"] for c in curves))}
    for curve in curves:
        row = curve["ways"][way]["mape"]
        points = [(n, max(value, 1e-4)) for n, value in enumerate(row) if value is not None]
        style = ":" if curve["window"] else "-"
        marker = "s" if curve["checkpointing"] else "o"
        axes.plot(
            *zip(*points, strict=True),
            style,
            color=colours[curve["name"]],
            marker=marker,
            markersize=3,
            label=label(curve),
        )
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
