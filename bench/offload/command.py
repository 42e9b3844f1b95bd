"""Out-of-core tuning on a CPU: files, AdamW, a streamed base, packed adapters, and limited memory.

    python bench/bench_offload.py io                         # one part; results beside --out
    python bench/bench_offload.py stream adapters --turns 7
    python bench/bench_offload.py --quick --out /tmp/quick   # all parts, tiny sizes

Parts: `io` (our reads and writes against fio), `adamw` (one pass against PyTorch's fused AdamW and a copy),
`stream` (a training step over a base on disk: one after the other, overlapped, mapped), `adapters` (tokens/s
against the number of adapters packed into a batch), `accelerate` (accelerate's disk offload with PEFT, and
DeepSpeed, under the same limit on memory), `capacity` (a base of three times the memory limit).

Parts of full tuning: `optimizer` (states on disk, updated after or under the backward pass), `swap`
(activations swapped against the planner's prediction), `activations` (keep, recompute or swap), `largest`
(the largest model under a memory limit), `full` (states of three times the memory limit).

Contenders take turns; ratios are of one turn, and their median counts. Models and files are written to a new
folder in --folder, which must be on a disk that serves O_DIRECT, and removed. Each part writes PART.json and
PART.txt. Quiet is the machine where other processes took little of it, which the text says. Exits with 1,
after results are written, where a target is missed; `--quick` judges none.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from shared import machine
from shared.harness import documented_parser, start_quietly
from shared.results import RESULTS, write_json
from transformers.utils import logging as transformers_logging

from offload import adamw, capacity, disk_speed, others, packed, streaming
from offload.base import check_disk, disk_scheduler, file_system
from offload.full_parts import FULL
from offload.options import QUICK_TURNS, TURNS, Options
from offload.remote import RemoteError
from offload.report import heading, missed, verdicts
from offload.turns import cores

PARTS: dict[str, ModuleType] = {
    "io": disk_speed,
    "adamw": adamw,
    "stream": streaming,
    "adapters": packed,
    "accelerate": others,
    "capacity": capacity,
    **FULL,
}


def run(name: str, options: Options) -> dict[str, Any]:
    """Runs one part.

    Args:
        name: in `PARTS`.
        options: with the folder in which one for models and files is made, and removed.

    Returns:
        What `PART.json` holds.

    Raises:
        OSError: the folder is in memory, or something that the part needs is missing.
    """
    check_disk(options.folder)
    start_quietly(options.threads)
    command = f"python bench/bench_offload.py {name} --turns {options.turns} --threads {options.threads}"
    command += " --quick" * options.quick
    if options.deepspeed and PARTS[name] is others:
        command += " --deepspeed PYTHON"
    data: dict[str, Any] = {
        "machine": machine.describe(command),
        "file_system": file_system(options.folder),
        "disk_scheduler": disk_scheduler(options.folder),
        "quick": options.quick,
    }
    with (
        tempfile.TemporaryDirectory(dir=options.folder, prefix="offload-") as own,
        machine.OtherProcesses() as rest,
    ):
        data |= PARTS[name].run(replace(options, folder=Path(own)))
    return data | {"other_processes_share": rest.share}


def write(name: str, data: Mapping[str, Any], out: Path) -> None:
    """Writes a part's numbers, text and, where it has one, figure to a folder, and prints the text."""
    lines = "\n".join([*heading(data), *PARTS[name].text(data), *verdicts(data)])
    write_json(out / f"{name}.json", data)
    (out / f"{name}.txt").write_text(lines + "\n")
    if hasattr(PARTS[name], "plot"):
        PARTS[name].plot(data, out / f"{name}.png")
    print(lines, flush=True)


def main() -> int:
    """Runs the parts, prints, and writes their results."""
    parser = documented_parser(__doc__)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--turns", type=int, help=f"of each contender; default: {TURNS}, quick {QUICK_TURNS}")
    parser.add_argument("--threads", type=int, help="that compute; default: all cores, quick 1")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk that is measured"
    )
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter that has DeepSpeed")
    parser.add_argument("--out", type=Path, default=RESULTS / "offload-cpu", help="folder of the results")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.parts if name not in PARTS]
    if unknown:
        parser.error(f"parts: expected some of {', '.join(PARTS)}, got {unknown[0]}")
    transformers_logging.disable_progress_bar()
    options = Options(
        arguments.folder,
        arguments.quick,
        arguments.turns or (QUICK_TURNS if arguments.quick else TURNS),
        arguments.threads or (1 if arguments.quick else cores()),
        arguments.deepspeed,
    )
    failed = []
    for name in arguments.parts or list(PARTS):
        print(f"{name} ...", flush=True)
        try:
            data = run(name, options)
        except (OSError, RemoteError) as error:
            print(f"error: {error}", file=sys.stderr)
            failed.append(name)
            continue
        write(name, data, arguments.out)
        failed += missed(data)
    if failed:
        print(f"failed or missed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
