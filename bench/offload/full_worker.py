"""Trains all weights of a model in a process of its own, and says how much memory it took.

The job is JSON in the first argument:

| Key | Meaning |
|---|---|
| `base` | the model's folder |
| `placement`, `states`, `activations` | as `OffloadOptions.base`, `.optimizer` and `.activations` |
| `tokens` | of the one sequence of random tokens that every step trains |
| `steps` | how many |
| `threads` | of PyTorch |
| `save` | folder to which it writes the trained model; may be missing |
| `limit` | on memory, in bytes: malloc is told as by `mlora train` under `scheduler.memory_limit`; or null |

It prints one line of JSON: `losses` and `seconds` of each step, and resident bytes: when the model was
`loaded`, after the last step, and the `peak`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from mlora.cluster.device import set_allocators
from mlora.data.dataset import Sample
from mlora.engine.full_engine import FullEngine
from mlora.offload.options import OffloadOptions
from mlora.optim.optim_config import OptimConfig
from shared.harness import start_quietly
from transformers.utils import logging as transformers_logging

from offload.base import DTYPE
from offload.contenders import random_batch
from offload.turns import timed

TASK = "full"


def main() -> None:
    """Loads, trains, and prints what it found."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    start_quietly(job["threads"])
    transformers_logging.disable_progress_bar()
    set_allocators(job["limit"], torch.device("cpu"))
    offload = OffloadOptions(base=job["placement"], optimizer=job["states"], activations=job["activations"])
    found: dict[str, Any] = {"losses": [], "seconds": []}
    with FullEngine(job["base"], dtype=DTYPE, offload=offload) as engine:
        engine.create_adapter(TASK, None, OptimConfig(1e-4, max_grad_norm=0.0, lr_scheduler_type="constant"))
        batch = random_batch({TASK: job["tokens"]}, engine.model.config.vocab_size)
        found["loaded"] = status("VmRSS")
        for _ in range(job["steps"]):
            found["seconds"].append(timed(lambda: found["losses"].append(_step(engine, batch)))["seconds"])
            found["resident"] = status("VmRSS")
        if "save" in job:
            engine.save(TASK, job["save"])
    print(json.dumps(found | {"peak": status("VmHWM")}), flush=True)


def _step(engine: FullEngine, batch: dict[str, list[Sample]]) -> float:
    """Trains a step, with updates during the backward pass; returns the loss."""
    found = engine.forward_backward(batch, ends=[TASK])[TASK]
    engine.optim_step(TASK)
    return found.loss_sum


def status(key: str) -> int:
    """Returns bytes that the kernel tells of this process: `VmRSS` now, `VmHWM` at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main()
