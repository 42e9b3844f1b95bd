"""What the scheduler takes of a step, and how well it predicts memory.

    python -m bench scheduler                        # both parts, 2 threads
    python -m bench scheduler prediction --quick --out /tmp/quick

`overhead`: a real run of 64 tasks under a limit on memory, with its queue, in which the scheduler's calls are
timed; in turns with runs without a limit and with every step measured. `prediction`: errors of the memory
model on unseen shapes against the number of measured micro-batches, as in the mLoRA paper, Fig. 8a.

Exits with 1, after results are written, where a "must" is missed; `--quick` judges none.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from shared import machine
from shared.harness import Data, Found, Panel, Target, measured

from scheduler import overhead, prediction

SCENES = {"all_fit": "all tasks fit", "some_wait": "some tasks wait"}
WAYS = {
    "seeded": "dry runs, then measurements",
    "unseeded": "the same fits, measurements alone",
    "paper": "one fit of the peak, measurements alone (the paper's)",
}


def must_lines(data: Data) -> list[Target]:
    """Returns what was asked for, and what was found, in percent; windowed models are not judged."""
    found = []
    if "overhead" in data:
        part = data["overhead"]
        for key, name in SCENES.items():
            value = 100 * part[key]["share"]
            found.append(Target(f"share of a step, %, {name}", value, most=100 * part["must"]))
    if "prediction" in data:
        part = data["prediction"]
        for curve in part["curves"]:
            if curve["window"] is None:
                after, name = curve["ways"]["seeded"]["worst_mape"][part["judged_at"]], label(curve)
                what = f"MAPE after {part['judged_at']} points, %, {name}"
                found.append(Target(what, after, most=part["must_mape"]))
                what = f"worst shape by seeds, %, {name}"
                found.append(Target(what, curve["seed_worst"], most=part["must_seed"]))
    return found


def label(curve: Data) -> str:
    """A model and its mode."""
    return f"{curve['name']}, {'recomputed' if curve['checkpointing'] else 'kept'}"


def text(data: Data) -> list[str]:
    """Returns a result in lines."""
    found = _overhead_lines(data["overhead"]) if "overhead" in data else []
    return found + (_prediction_lines(data["prediction"]) if "prediction" in data else [])


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


def panels(part: Data) -> list[Panel]:
    """Returns the errors of predictions against the number of points, a panel for each way."""
    found = []
    for way, name in WAYS.items():
        series = {
            label(curve): {n: max(e, 1e-4) for n, e in enumerate(curve["ways"][way]["mape"]) if e is not None}
            for curve in part["curves"]
        }
        found.append(Panel("MAPE on unseen shapes, %", series, name, "measured micro-batches", False, True))
    return found


PARTS = {"overhead": overhead.run, "prediction": prediction.run}


def measure(options: argparse.Namespace) -> Found:
    """Runs parts of the benchmark."""
    data: dict[str, Any] = {}
    for name in options.parts or list(PARTS):
        print(f"{name} ...", flush=True)
        with tempfile.TemporaryDirectory() as folder, machine.OtherProcesses() as others:
            data[name] = PARTS[name](Path(folder), quick=options.quick)
        data[name]["other_processes_share"] = others.share
    drawn = panels(data["prediction"]) if "prediction" in data else []
    return Found(data, text(data), must_lines(data), drawn)


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the parts."""
    parser.add_argument(
        "parts", nargs="*", metavar="PART", choices=[*PARTS, []], help=f"of {', '.join(PARTS)}; default: all"
    )


def main() -> int:
    """Measures, prints, and writes the results."""
    return measured(__doc__, measure, out="scheduler", turns=1, add=add)
