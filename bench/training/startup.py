"""Measures how long `mlora --help` takes, and what `import mlora_ext` adds to `import torch`.

    python -m bench startup --out startup

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
from statistics import median

from shared.harness import Found, Target, measured, table

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


def times_of(turns: int) -> dict[str, list[tuple[float, float]]]:
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


def measure(options: argparse.Namespace) -> Found:
    """Measures all commands."""
    rows = summary(times_of(options.turns))
    columns = (("wall s", "wall", "6.3f", 1.0), ("processor s", "processor", "11.3f", 1.0))
    must = [
        Target(HELP, rows[HELP]["wall"], most=HELP_LIMIT),
        Target(OURS, rows["added"]["wall"], most=ADDED_LIMIT),
    ]
    return Found({"turns": options.turns, "medians": rows}, table(rows, columns), must)


def main() -> int:
    """Measures, prints, and writes the results."""
    return measured(__doc__, measure, out="startup", turns=30)
