"""Predicted time of a step with the plans of LoHan, ZeRO, Capuchin, G10 and Checkmate.

Nothing is measured: all plans are timed by our own predictor, with the same traffic of weights and states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlora.cli.tables import aligned
from mlora.offload.planner.iteration_time import iteration_time
from mlora.offload.planner.machine import Budget, Machine
from mlora.offload.planner.memory_need import memory_need
from mlora.offload.planner.workload import OffloadWorkload, StatePlacement
from mlora.simulate.public_models import PUBLIC_MODELS
from shared.harness import documented_parser

from offload.rivals import RIVALS

GB = 1e9
GPU = Machine(165e12, 32 * GB, 20 * GB, 21 * GB, 21 * GB, cores=32, update_seconds=1.1e-9)
"""A consumer GPU over PCIe 4 with an array of disks, about that of LoHan's paper, section V-A."""

MACHINES = {
    "GPU, disk array": (GPU, Budget(24 * GB, 256 * GB)),
    "GPU, one NVMe": (replace(GPU, read=7 * GB, write=5 * GB), Budget(24 * GB, 64 * GB)),
    "16 cores, one NVMe": (
        Machine(2e12, 7 * GB, 5 * GB, one_memory=True, cores=16, compute_cores=16, update_seconds=1.1e-9),
        Budget(32 * GB),
    ),
}
"""Names, rates and memory; assumed, not measured."""


@dataclass(frozen=True)
class Step:
    """A model, how it is trained, and the tokens of a micro-batch."""

    model: str
    method: str
    tokens: int

    def workload(self) -> OffloadWorkload:
        """Returns what the planner sees of it."""
        adapters = max(1, self.tokens // 1024)
        return PUBLIC_MODELS[self.model].workload(self.tokens, method=self.method, adapters=adapters)

    def placement(self) -> StatePlacement:
        """Returns where its parts live: weights on disk, an adapter's states on the host."""
        return StatePlacement(base="disk", optimizer="disk" if self.method == "full" else "host")


STEPS = (
    Step("llama-2-7b", "lora", 8192),
    Step("llama-2-7b", "lora", 16384),
    Step("llama-3-70b", "lora", 4096),
    Step("llama-2-13b", "full", 8192),
    Step("llama-2-13b", "full", 16384),
)


def seconds_of_plans(machine: Machine, budget: Budget, step: Step) -> dict[str, float]:
    """Returns the predicted seconds with each rival's plan; endless if it does not fit into the budget."""
    work, place = step.workload(), step.placement()
    found = {}
    for name, rival in RIVALS.items():
        try:
            plan = rival(machine, work, place, budget)
        except ValueError:
            found[name] = math.inf
            continue
        fits = memory_need(machine, work, place, plan).fits(budget)
        found[name] = iteration_time(machine, work, place, plan).seconds if fits else math.inf
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each machine and step."""
    parser = documented_parser(__doc__)
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES), metavar="NAME")
    chosen = parser.parse_args(arguments).machines
    rows = [["machine", "model", "method", "tokens", *RIVALS]]
    for name in chosen:
        for step in STEPS:
            seconds = seconds_of_plans(*MACHINES[name], step)
            cells = ["no room" if math.isinf(each) else f"{each:.2f} s" for each in seconds.values()]
            rows.append([name, step.model, step.method, str(step.tokens), *cells])
    print("predicted, not measured; seconds of a step")
    print(aligned(rows))
    return 0
