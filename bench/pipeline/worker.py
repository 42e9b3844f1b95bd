"""One process of a job: `python -m bench pipeline-worker JOB.json OUT_FOLDER`, under a launcher.

All contenders of a job live in the same processes and take turns, every second time in reverse order: the
machine drifts, and those that are compared shall have met the same speed. In a first turn each begins with
the same adapters, so that its losses must be those of the others; it also warms up.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mlora.cluster.allocators import keep_freed_memory
from mlora.cluster.world import World
from mlora.pipeline import Neighbours, connect_neighbours
from shared.machine import busy_seconds

from pipeline.ours import NothingLearned, Ours, SleepingStage
from pipeline.places import Case


class _Sleeping:
    """Contenders whose stages sleep."""

    def __init__(self, job: dict[str, Any], neighbours: Neighbours, place: tuple[int, int]) -> None:
        seconds = job["sleep"]
        self._module = SleepingStage(seconds["forward"], seconds["backward"])
        self._neighbours, self._place = neighbours, place

    def make(self, case: Case) -> tuple[Any, Any]:
        """A contender, and what of it begins again before its first turn."""
        ids, trained = torch.zeros(64), NothingLearned()
        loss = lambda output, _: output.sum()  # noqa: E731
        return Ours(case, self._module, trained, lambda _: ids, loss, self._neighbours, self._place), trained


class _Computing:
    """Contenders that train the model."""

    def __init__(self, job: dict[str, Any], neighbours: Neighbours, place: tuple[int, int]) -> None:
        from pipeline.model import Model, Shape, Trained, token_ids

        self._neighbours, self._place = neighbours, place
        self._shape = shape = Shape(**job["shape"])
        self._adapters = max(Case(**case).adapters for case in job["cases"])
        self._batch: Callable[..., Any] = lambda item: token_ids(shape, *item)
        self._module = Model(shape, self._adapters).cut(*place)
        self._trained = Trained(self._module, self._adapters)

    def make(self, case: Case) -> tuple[Any, Any]:
        """A contender, and what of it begins again before its first turn."""
        from torch.distributed.device_mesh import init_device_mesh

        from pipeline.model import Model, next_token_loss
        from pipeline.peers import Fsdp, TensorByHand, TensorParallel, TorchPipeline

        if case.way in ("ours", "torch"):
            common = (case, self._module, self._trained, self._batch, next_token_loss)
            if case.way == "ours":
                return Ours(*common, self._neighbours, self._place), self._trained
            group = dist.new_group(list(range(self._place[1])), backend="gloo")
            return TorchPipeline(*common, group, self._place), self._trained
        way = {"fsdp": Fsdp, "tensor": TensorParallel, "by hand": TensorByHand}[case.way]
        model, mesh = Model(self._shape, self._adapters), init_device_mesh("cpu", (self._place[1],))
        found = way(case, model, self._adapters, self._batch, next_token_loss, mesh)
        return found, found.trained


def _timed(contender: Any, steps: int, interface: str | None) -> dict[str, Any]:
    """A turn, from when all processes begin to when all have ended."""
    dist.barrier()
    before, busy = (_sent(interface), time.process_time()), busy_seconds() or 0.0
    begin = time.monotonic()
    turn = contender.turn(steps)
    dist.barrier()
    return asdict(turn) | {
        "begin": begin,
        "seconds": time.monotonic() - begin,
        "processor_seconds": time.process_time() - before[1],
        "machine_seconds": (busy_seconds() or 0.0) - busy,
        "wire": _sent(interface) - before[0],
    }


def _sent(interface: str | None) -> int:
    """Bytes that an interface of this process's network namespace has sent, frames' headers included."""
    if interface is None:
        return 0
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counters = next(line.partition(":")[2] for line in lines if line.strip().startswith(f"{interface}:"))
    return int(counters.split()[8])


def main() -> None:
    """Run the job as one of its processes."""
    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    keep_freed_memory()
    world = World.from_launcher()
    assert world is not None
    limit = timedelta(seconds=300)
    store = dist.PrefixStore("peers", world.store)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=limit)
    neighbours = connect_neighbours(world)
    makers = _Sleeping if "sleep" in job else _Computing
    maker = makers(job, neighbours, (world.rank, world.size))
    cases = [Case(**case) for case in job["cases"]]
    contenders = [(case, *maker.make(case)) for case in cases]
    interface = job.get("interface")
    found: dict[str, Any] = {case.name: [] for case in cases}
    for case, contender, trained in contenders:
        trained.reset()
        found[case.name].append(_timed(contender, job["warm_up_steps"], interface))
    for turn in range(job["repeats"]):
        if world.rank == 0:
            print(f"  turn {turn + 1} of {job['repeats']}", file=sys.stderr, flush=True)
        for case, contender, _trained in contenders[:: -1 if turn % 2 else 1]:
            found[case.name].append(_timed(contender, case.steps, interface))
    (out / f"{world.rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
