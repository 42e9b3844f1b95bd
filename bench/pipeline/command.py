"""LoRAPP against flushed pipelines, torch's own ones, FSDP2 and tensor parallelism, in the same run.

    python -m bench pipeline                          # all sections; results beside --out
    python -m bench pipeline throughput --repeats 3
    python -m bench pipeline --quick --out /tmp/quick/pipeline
    python -m bench pipeline --from pipeline.json     # of a kept result, text and figure anew

Sections: `throughput` (two processes of one thread each), `network` (the same between two network namespaces
at 1 Gbit/s; needs root), `volume` (bytes sent), `bubbles` (measured and simulated; four and eight stages of
SLEEP KERNELS beside two real ones), `overlap` (delays injected on the links), `tasks` (completion times).

Contenders of a place live in the same processes and take turns; medians are compared. All train the same
Llama of random weights with plain LoRA on every linear layer (`network`: q and v), by AdamW without clipping,
on as large micro-batches, as many tokens per optimizer step and in a turn; before they are timed, their
losses before and after an update must agree. Quiet is the machine where `processors` is near D (1 - bubble)
for pipelines and `others` near 0. Exits with 1, after results are written, where a "must" is missed;
`--quick` judges none.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shared.harness import Found, measured

from pipeline import results
from pipeline.measures import row_of, worst_difference
from pipeline.places import RATE, TURNS, Place, place_of, places
from pipeline.results import lines_of
from pipeline.start import JobError, run_job, run_network_job, why_no_network

SECTIONS = ("throughput", "network", "volume", "bubbles", "overlap", "tasks")
ALLOWED = 1e-5
"""Relative difference of losses between contenders, before and after an update."""


def run_place(place: Place) -> dict[str, Any]:
    """Run a place's job.

    Raises:
        JobError: a process failed, or contenders do not compute the same.
    """
    job = place.job()
    ranks = run_network_job(job, RATE) if place.network else run_job(job, place.stages)
    turns = {case.name: list(zip(*(rank[case.name] for rank in ranks), strict=True)) for case in place.cases}
    difference = None
    if place.shape:
        difference = worst_difference([(case, turns[case.name][0]) for case in place.cases])
        if not difference < ALLOWED:
            raise JobError(f"{place.name}: losses of contenders differ by {difference:.1e}")
    rows = {case.name: row_of(case, turns[case.name][1:], place.rows) for case in place.cases}
    return {
        "name": place.name,
        "stages": place.stages,
        "shape": asdict(place.shape) if place.shape else None,
        "sleep": place.sleep,
        "network": place.network,
        "rate": RATE if place.network else None,
        "losses_differ_by": difference,
        "cases": [asdict(case) for case in place.cases],
        "rows": rows,
    }


def run(sections: list[str], *, quick: bool, repeats: int | None) -> dict[str, Any]:
    """Runs sections; returns what `pipeline.json` holds."""
    found, not_run = [], {}
    for place in places(sections, quick=quick, repeats=repeats):
        reason = why_no_network() if place.network else ""
        if reason:
            not_run[place.name] = reason
            continue
        print(f"{place.name}: {len(place.cases)} contenders, {place.repeats} turns each", flush=True)
        found.append((place, run_place(place)))
    return {
        "sections": sections,
        "places": [result for _, result in found],
        "lines": lines_of(sections, [(place, result["rows"]) for place, result in found]),
        "not_run": not_run,
    }


def again(path: Path) -> dict[str, Any]:
    """Returns a kept result, with what follows from its measured numbers made anew.

    Args:
        path: of a `pipeline.json`; one without `sections` is of all.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON.
    """
    data: dict[str, Any] = json.loads(path.read_text())
    found = [(place_of(result), result["rows"]) for result in data["places"]]
    kept = {"other_processes_share": data.get("other_processes_share")}
    return data | kept | {"lines": lines_of(data.get("sections", SECTIONS), found)}


def measure(options: argparse.Namespace) -> Found:
    """Runs the sections, or takes those of a kept result."""
    if options.kept:
        data = again(options.kept)
    else:
        data = run(options.sections or list(SECTIONS), quick=options.quick, repeats=options.repeats)
    return Found(data, results.text(data), results.targets(data["lines"]), results.panels(data))


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="SECTION",
        choices=[*SECTIONS, []],
        help=f"some of {', '.join(SECTIONS)}; default: all",
    )
    turns = ", ".join(f"{name} {count}" for name, count in TURNS.items())
    parser.add_argument("--repeats", type=int, help=f"turns of each contender; default: {turns}; quick 1")
    parser.add_argument("--from", type=Path, dest="kept", help="pipeline.json: report it, measure nothing")


def main() -> int:
    """Measures, prints, and writes the results."""
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        return measured(__doc__, measure, out="pipeline-cpu/pipeline", threads=1, add=add)
    except (JobError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
