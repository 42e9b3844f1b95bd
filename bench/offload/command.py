"""Out-of-core tuning on a CPU: files, AdamW, a streamed base, packed adapters, and limited memory.

    python -m bench offload io                         # one part; results beside --out
    python -m bench offload stream adapters --turns 7
    python -m bench offload --quick --out /tmp/quick   # all parts, tiny sizes

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

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from shared import machine
from shared.harness import Found, documented_parser, report, start_quietly
from shared.results import RESULTS
from shared.timing import cores

from offload import accelerate, adamw, adapters, io, limits, optimizer, stream, swap
from offload.base import check_disk, disk_scheduler, file_system
from offload.remote import RemoteError

PARTS: dict[str, Callable[[argparse.Namespace], Found]] = {
    "io": io.run,
    "adamw": adamw.run,
    "stream": stream.run,
    "adapters": adapters.run,
    "accelerate": accelerate.run,
    "capacity": limits.capacity,
    "optimizer": optimizer.run,
    "swap": swap.run,
    "activations": swap.activations,
    "largest": limits.largest,
    "full": limits.full,
}


def run(name: str, options: argparse.Namespace) -> int:
    """Runs one part in a folder of its own, and writes what it found; returns the exit code.

    Raises:
        OSError: the folder is in memory, or something that the part needs is missing.
        RemoteError: a process of its own failed.
    """
    check_disk(options.folder)
    start_quietly(options.threads)
    command = f"python -m bench offload {name} --turns {options.turns} --threads {options.threads}"
    command += " --quick" * options.quick + " --deepspeed PYTHON" * bool(options.deepspeed)
    disk = {"file_system": file_system(options.folder), "disk_scheduler": disk_scheduler(options.folder)}
    with (
        tempfile.TemporaryDirectory(dir=options.folder, prefix="offload-") as own,
        machine.OtherProcesses() as others,
    ):
        found = PARTS[name](argparse.Namespace(**{**vars(options), "folder": Path(own)}))
    found.data = disk | found.data
    found.lines.insert(0, f"disk: {disk['file_system']}, scheduler {disk['disk_scheduler'] or 'unknown'}")
    return report(found, options.out / name, quick=options.quick, others=others.share, command=command)


def main() -> int:
    """Runs the parts; returns the exit code."""
    parser = documented_parser(__doc__)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--turns", type=int, help="of each contender; default: 5, quick 1")
    parser.add_argument("--threads", type=int, help="that compute; default: all cores, quick 1")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk that is measured"
    )
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter that has DeepSpeed")
    parser.add_argument("--out", type=Path, default=RESULTS / "offload-cpu", help="folder of the results")
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"parts: expected some of {', '.join(PARTS)}, got {unknown[0]}")
    options.turns = options.turns or (1 if options.quick else 5)
    options.threads = options.threads or (1 if options.quick else cores())
    failed = []
    for name in options.parts or list(PARTS):
        print(f"{name} ...", flush=True)
        try:
            failed += [name] * run(name, options)
        except (OSError, RemoteError) as error:
            print(f"error: {error}", file=sys.stderr)
            failed.append(name)
    if failed:
        print(f"failed or missed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
