"""Trains with this library, a step for each line that it reads; started by `remote.py`.

A line is a way: `together` (one sequence for each adapter, in one batch), `apart` (the same, one adapter
after the other), `one` (all of these sequences for one adapter); `full` trains all weights, and `save` writes
the model. The job is JSON:

| Key | Meaning |
|---|---|
| `base` | the model's folder |
| `placement`, `slots` | `device` or `disk`, and the blocks in memory |
| `states`, `activations` | of full tuning: as `OffloadOptions.optimizer` and `.activations`; else missing |
| `checkpointing` | whether blocks are recomputed |
| `adapters`, `rank`, `targets`, `tokens` | the adapters, and the tokens of a sequence |
| `threads` | of PyTorch |
| `limit` | on memory, in bytes: malloc is told as by `mlora train` under `scheduler.memory_limit`; or null |
| `base_gemm` | the library of another run, whose bits are to be met; null = measured |

Each answer has `seconds`, `processors`, `losses`, and the process's resident bytes: `resident` and `peak`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mlora.cluster.device import set_allocators
from mlora.data.dataset import Sample
from mlora.engine.engine import Engine
from mlora.engine.full_engine import FullEngine
from mlora.offload.options import OffloadOptions
from mlora.optim.optim_config import OptimConfig
from shared.harness import start_quietly
from shared.machine import resident
from shared.timing import timed

from offload.base import DTYPE
from offload.contenders import add_adapters, random_batch, train

TASK = "full"
Batch = dict[str, list[Sample]]


def main() -> None:
    """Loads, says that it is ready, and trains until its input ends."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    start_quietly(job["threads"])
    set_allocators(job["limit"], torch.device("cpu"))
    offload: dict[str, Any] = {"base": job["placement"]}
    if "states" in job:
        offload |= {"optimizer": job["states"], "activations": job["activations"]}
        engine: Any = FullEngine(job["base"], dtype=DTYPE, offload=OffloadOptions(**offload))
        ways = full_ways(engine, job)
    else:
        recompute = {"gradient_checkpointing": job["checkpointing"]}
        options = OffloadOptions(slots=job["slots"], **offload)
        engine = Engine(job["base"], dtype=DTYPE, offload=options, **recompute)
        if job["base_gemm"]:
            engine.base_gemm = job["base_gemm"]
        ways = adapter_ways(engine, job)
    with engine:
        ready = {"base_gemm": engine.base_gemm, "torch": torch.__version__, "loaded": resident("VmRSS")}
        print(json.dumps(ready), flush=True)
        for line in sys.stdin:
            taken = timed(ways[line.strip()])
            taken |= {"resident": resident("VmRSS"), "peak": resident("VmHWM")}
            print(json.dumps(taken), flush=True)


def adapter_ways(engine: Engine, job: dict[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Returns the ways to train a job's adapters."""
    names = add_adapters(engine, job["adapters"], job["rank"], job["targets"])
    batch = random_batch(dict.fromkeys(names, job["tokens"]), engine.model.config.vocab_size)
    whole = {names[0]: [sample for samples in batch.values() for sample in samples]}
    batches = {"together": [batch], "apart": [{name: batch[name]} for name in names], "one": [whole]}
    return {way: partial(_steps, engine, each) for way, each in batches.items()}


def _steps(engine: Engine, batches: Sequence[Batch]) -> dict[str, Any]:
    losses: dict[str, float] = {}
    for batch in batches:
        losses |= train(engine, batch)
    return {"losses": losses}


def full_ways(engine: FullEngine, job: dict[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Returns the ways to train all weights on one sequence of random tokens, and to write them."""
    engine.create_adapter(TASK, None, OptimConfig(1e-4, max_grad_norm=0.0, lr_scheduler_type="constant"))
    batch = random_batch({TASK: job["tokens"]}, engine.model.config.vocab_size)

    def step() -> dict[str, Any]:
        """With updates during the backward pass."""
        found = engine.forward_backward(batch, ends=[TASK])[TASK]
        engine.optim_step(TASK)
        return {"losses": {TASK: found.loss_sum}}

    def save() -> dict[str, Any]:
        engine.save(TASK, Path(job["base"]) / "trained")
        return {}

    return {"full": step, "save": save}
