"""Trains adapters with this library, a step for each line that it reads; started by `remote.py`.

A line is a way: `together` (one sequence for each adapter, in one batch), `apart` (the same, one adapter
after the other), or `one` (all of these sequences for one adapter). The job is JSON:

| Key | Meaning |
|---|---|
| `base` | the model's folder |
| `placement`, `slots` | `device` or `disk`, and the blocks in memory |
| `checkpointing` | whether blocks are recomputed |
| `adapters`, `rank`, `targets`, `tokens` | the adapters, and the tokens of a sequence |
| `threads` | of PyTorch |
| `limit` | on memory, in bytes: malloc is told as by `mlora train` under `scheduler.memory_limit`; or null |
| `base_gemm` | the library of another run, whose bits are to be met; null = measured |
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from mlora.cluster.device import set_allocators
from mlora.data.dataset import Sample
from mlora.engine.engine import Engine
from mlora.offload.options import OffloadOptions
from shared.harness import start_quietly
from transformers.utils import logging as transformers_logging

from offload.base import DTYPE
from offload.contenders import add_adapters, random_batch, train
from offload.turns import timed


def main() -> None:
    """Loads, says that it is ready, and trains until its input ends."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    start_quietly(job["threads"])
    transformers_logging.disable_progress_bar()
    set_allocators(job["limit"], torch.device("cpu"))
    offload = OffloadOptions(base=job["placement"], slots=job["slots"])
    recompute = {"gradient_checkpointing": job["checkpointing"]}
    with Engine(job["base"], dtype=DTYPE, offload=offload, **recompute) as engine:
        if job["base_gemm"]:
            engine.base_gemm = job["base_gemm"]
        names = add_adapters(engine, job["adapters"], job["rank"], job["targets"])
        vocabulary = engine.model.config.vocab_size
        batch = random_batch(dict.fromkeys(names, job["tokens"]), vocabulary)
        whole = {names[0]: [sample for samples in batch.values() for sample in samples]}
        batches = {"together": [batch], "apart": [{n: batch[n]} for n in names], "one": [whole]}
        print(json.dumps({"base_gemm": engine.base_gemm, "torch": torch.__version__}), flush=True)
        for line in sys.stdin:
            losses: dict[str, float] = {}
            taken = timed(_step(engine, batches[line.strip()], losses))
            print(json.dumps(taken | {"losses": losses}), flush=True)


def _step(
    engine: Engine, batches: list[dict[str, list[Sample]]], losses: dict[str, float]
) -> Callable[[], None]:
    """Returns a function that trains batches one after the other, and notes their losses."""

    def step() -> None:
        for batch in batches:
            losses.update(train(engine, batch))

    return step


if __name__ == "__main__":
    main()
