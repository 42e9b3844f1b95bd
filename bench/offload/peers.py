"""Trains PEFT's adapters over a base that another library keeps on disk; started by `remote.py`.

Reads a way from each line, `apart` or `one`, as `worker.py` does. This module imports nothing of this
project, so that an interpreter without it will do. The job is JSON:

| Key | Meaning |
|---|---|
| `library` | `accelerate` or `deepspeed` |
| `base`, `scratch` | the model's folder, and one for the library's own files |
| `checkpointing` | whether blocks are recomputed |
| `adapters`, `rank`, `targets` | the adapters; DeepSpeed trains the first one only |
| `rows` | a sequence of tokens for each adapter, all of the same length |
| `threads`, `port` | of PyTorch; for DeepSpeed's process group of one |
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

_BUFFERS = 16
Step = Callable[[str, Tensor], float]
"""Trains one adapter on sequences `[S, L]`; returns the sum of its tokens' losses."""


def accelerate(job: dict[str, Any]) -> Step:
    """Blocks on disk by `device_map`: accelerate maps the checkpoint's files, and unmaps blocks after use.

    PEFT puts the adapters of such layers on the meta device, where they cannot be trained, so they are made
    anew on the CPU.
    """
    config = json.loads((Path(job["base"]) / "config.json").read_text())
    around = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    places = dict.fromkeys(around, "cpu")
    places |= {f"model.layers.{block}": "disk" for block in range(config["num_hidden_layers"])}
    base = AutoModelForCausalLM.from_pretrained(
        job["base"], dtype=torch.bfloat16, device_map=places, offload_folder=job["scratch"]
    )
    model = _with_adapters(base, job, job["adapters"])
    for name, module in model.named_modules():
        if "lora_" in name and isinstance(module, nn.Linear) and module.weight.is_meta:
            module.to_empty(device="cpu")
            if "lora_A" in name:
                nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
            else:
                nn.init.zeros_(module.weight)
    optimizers: dict[str, torch.optim.Optimizer] = {}

    def step(name: str, rows: Tensor) -> float:
        model.set_adapter(name)
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        parameters = [p for p in model.parameters() if p.requires_grad]
        if name not in optimizers:
            optimizers[name] = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=True)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizers[name].step()
        optimizers[name].zero_grad()
        return _sum(loss, rows)

    return step


def deepspeed(job: dict[str, Any]) -> Step:
    """ZeRO-3 with parameters on disk; one adapter, because all that it trains is in one optimizer."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    config = _deepspeed_config(job)
    keep = HfDeepSpeedConfig(config)  # from_pretrained looks for it
    base = AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.bfloat16)
    model = _with_adapters(base, job, 1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    del keep

    def step(_: str, rows: Tensor) -> float:
        loss = engine(input_ids=rows, labels=rows, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return _sum(loss, rows)

    return step


def _deepspeed_config(job: dict[str, Any]) -> dict[str, Any]:
    """Returns DeepSpeed's config: a block is live, one more matrix is read ahead, adapters stay in memory.

    A buffer has the size of the largest matrix. As many live numbers as a block has are up to twelve of
    Llama's smallest matrices.
    """
    config = json.loads((Path(job["base"]) / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    largest = max(hidden * inner, config["vocab_size"] * hidden)
    block = 4 * hidden * hidden + 3 * hidden * inner
    on_disk = {"device": "nvme", "nvme_path": job["scratch"], "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": job["adapters"],
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "offload_param": on_disk | {"buffer_count": _BUFFERS, "buffer_size": largest},
            "stage3_max_live_parameters": block,
            "stage3_max_reuse_distance": block,
            "stage3_prefetch_bucket_size": largest,
            "stage3_param_persistence_threshold": 100_000,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "single_submit": False, "overlap_events": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.0, "torch_adam": True}},
    }


LIBRARIES = {"accelerate": accelerate, "deepspeed": deepspeed}


def main() -> None:
    """Loads, says that it is ready, and trains until its input ends."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    step = LIBRARIES[job["library"]](job)
    names = [f"a{number}" for number in range(job["adapters"])]
    rows = torch.tensor(job["rows"])
    ways: dict[str, Sequence[tuple[str, Tensor]]] = {
        "apart": [(name, rows[place : place + 1]) for place, name in enumerate(names)],
        "one": [(names[0], rows)],
    }
    libraries = ("torch", "transformers", "peft", job["library"])
    print("\n" + json.dumps({"versions": {name: version(name) for name in libraries}}), flush=True)
    for line in sys.stdin:
        wall, processor = time.perf_counter(), time.process_time()
        losses = {name: step(name, own) for name, own in ways[line.strip()]}
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        taken = {"seconds": wall, "processors": processor / wall, "losses": losses}
        print("\n" + json.dumps(taken), flush=True)


def _with_adapters(base: Any, job: dict[str, Any], count: int) -> Any:
    lora = LoraConfig(r=job["rank"], lora_alpha=job["rank"], target_modules=job["targets"])
    model = get_peft_model(base, lora, adapter_name="a0")
    for number in range(1, count):
        model.add_adapter(f"a{number}", lora)
    if job["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _sum(loss: Tensor, rows: Tensor) -> float:
    return float(loss.detach()) * rows.shape[0] * (rows.shape[1] - 1)


if __name__ == "__main__":
    main()
