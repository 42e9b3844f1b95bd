"""What the scheduler takes of a step, and how well it predicts memory.

    python bench/bench_scheduler.py                        # both parts, 2 threads
    python bench/bench_scheduler.py prediction --quick --out /tmp/quick

`overhead`: a real run of 64 tasks under a limit on memory, with its queue, in which the scheduler's calls are
timed; in turns with runs without a limit and with every step measured. `prediction`: errors of the memory
model on unseen shapes against the number of measured micro-batches, as in the mLoRA paper, Fig. 8a.

Exits with 1, after results are written, where a "must" is missed; `--quick` judges none.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared import machine
from shared.harness import documented_parser, start_quietly
from shared.results import RESULTS, write_json
from transformers.utils import logging as transformers_logging

from scheduler import overhead, prediction
from scheduler.report import must_lines, plot, text

PARTS = {"overhead": overhead.run, "prediction": prediction.run}


def run(parts: Sequence[str], *, quick: bool) -> dict[str, Any]:
    """Run parts of the benchmark.

    Args:
        parts: names in `PARTS`.
        quick: tiny sizes.

    Returns:
        What `scheduler.json` holds.
    """
    found: dict[str, Any] = {"machine": machine.describe(), "quick": quick}
    for name in parts:
        print(f"{name} ...", flush=True)
        with tempfile.TemporaryDirectory() as folder, machine.OtherProcesses() as others:
            found[name] = PARTS[name](Path(folder), quick=quick)
        found[name]["other_processes_share"] = others.share
    return found | {"must": must_lines(found)}


def main() -> int:
    """Run, print, and write `scheduler.json` and, with predictions, `scheduler.png`."""
    parser = documented_parser(__doc__)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; default: all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.parts if name not in PARTS]
    if unknown:
        parser.error(f"parts: expected some of {', '.join(PARTS)}, got {unknown[0]}")
    start_quietly(arguments.threads)
    transformers_logging.disable_progress_bar()
    data = run(arguments.parts or list(PARTS), quick=arguments.quick)
    write_json(arguments.out / "scheduler.json", data)
    if "prediction" in data:
        plot(data, arguments.out / "scheduler.png")
    print(text(data), end="")
    missed = [line["what"] for line in data["must"] if not line["met"]]
    if missed and not arguments.quick:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
        return 1
    return 0
