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
from shared.harness import Found, measured

from scheduler import overhead, prediction, report

PARTS = {"overhead": overhead.run, "prediction": prediction.run}


def measure(options: argparse.Namespace) -> Found:
    """Runs parts of the benchmark."""
    data: dict[str, Any] = {}
    for name in options.parts or list(PARTS):
        print(f"{name} ...", flush=True)
        with tempfile.TemporaryDirectory() as folder, machine.OtherProcesses() as others:
            data[name] = PARTS[name](Path(folder), quick=options.quick)
        data[name]["other_processes_share"] = others.share
    panels = report.panels(data["prediction"]) if "prediction" in data else []
    return Found(data, report.text(data), report.must_lines(data), panels)


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the parts."""
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help=f"of {', '.join(PARTS)}; default: all")


def main() -> int:
    """Measures, prints, and writes the results."""
    return measured(__doc__, measure, out="scheduler", turns=1, add=add)
