"""Measures how long `mlora --help` takes, and what `import mlora_ext` adds to `import torch`.

    python bench/bench_startup.py --turns 30

Every figure is of fresh processes, which take turns. Bytecode is compiled before the first turn, as pip does.
"added" and "ratio" are medians over the turns, each against `import torch` in the same turn. Exits with 1 if
a limit is missed. On a busy machine, look at processor times instead.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from shared.machine import describe
from shared.results import write_json

HELP, TORCH, OURS = "mlora --help", "import torch", "import mlora_ext"
COMMANDS = {
    "python": ["-c", "pass"],
    HELP: ["-m", "mlora", "--help"],
    TORCH: ["-c", "import torch"],
    OURS: ["-c", "import torch, mlora_ext"],
}
HELP_LIMIT, ADDED_LIMIT = 0.3, 0.2
"""Seconds of wall time."""


def timed(arguments: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Wall and processor seconds of one fresh process."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, *arguments]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(turns: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and processor seconds of each command in each turn."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for turn in range(turns + 1):
            for name, arguments in COMMANDS.items():
                times = timed(arguments, environment)
                if turn:  # the first one compiles
                    found[name].append(times)
    return found


def summary(found: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Medians of wall and processor seconds, and what `import mlora_ext` adds to `import torch`."""
    rows = {name: medians(times) for name, times in found.items()}
    pairs = list(zip(found[OURS], found[TORCH], strict=True))
    rows["added"] = medians([(ours[0] - torch[0], ours[1] - torch[1]) for ours, torch in pairs])
    rows["ratio"] = medians([(ours[0] / torch[0], ours[1] / torch[1]) for ours, torch in pairs])
    return rows


def medians(times: list[tuple[float, float]]) -> dict[str, float]:
    """The median of the wall figures and that of the processor figures."""
    wall, processor = zip(*times, strict=True)
    return {"wall": median(wall), "processor": median(processor)}


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=30, help="processes of each kind; default: 30")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    rows = summary(measure(options.turns))
    print(f"{'':18} wall s  processor s")
    for name, values in rows.items():
        print(f"{name:18} {values['wall']:6.3f}  {values['processor']:11.3f}")
    if options.out:
        write_json(options.out, {"machine": describe(), "turns": options.turns, "medians": rows})
    missed = [HELP] if rows[HELP]["wall"] > HELP_LIMIT else []
    missed += [OURS] if rows["added"]["wall"] > ADDED_LIMIT else []
    for name in missed:
        print(f"MISSED: {name}")
    return bool(missed)


if __name__ == "__main__":
    raise SystemExit(main())
