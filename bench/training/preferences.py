"""Four DPO adapters in one run, against TRL's `DPOTrainer` training them one after the other.

    .venv-peers/bin/python -m bench preferences            # `make peers` makes this environment
    .venv-peers/bin/python -m bench preferences --quick

Each way trains in a process of its own, in turns; medians of the turns are compared. Both train on the same
pairs, all equally long, so that TRL pads nothing. The adapters differ in beta and have data of their own, or
all the same data (as in a search over beta), where equal reference sequences are run once. Tokens are those
of the pairs, without the reference's. Memory is the process's peak resident memory over that with the model
loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shared import machine
from shared.harness import Found, measured, start_quietly, table
from shared.shapes import ModelShape, random_llama

VOCABULARY = 4096
ADAPTERS, BATCH, PROMPT, COMPLETION = 4, 4, 32, 32
BETAS = [0.05, 0.1, 0.2, 0.5]
WARM_UP = 2
WAYS = ("ours", "ours, one data set", "TRL")
LORA = {"r": 16, "lora_alpha": 16, "target_modules": "all-linear"}


def base() -> Any:
    """Llama of 2 layers, hidden 256, random."""
    shape = ModelShape(256, 688, heads=4, kv_heads=4, layers=2, vocabulary=VOCABULARY)
    return random_llama(shape, max_position_embeddings=512)


def pairs(count: int, seed: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompt, chosen and rejected ids."""
    draw = random.Random(seed)
    sizes = (PROMPT, COMPLETION, COMPLETION)
    return [tuple([draw.randrange(3, VOCABULARY) for _ in range(n)] for n in sizes) for _ in range(count)]  # type: ignore[misc]


def ours(steps: int, shared_data: bool) -> dict[str, float]:
    """Seconds of the steps, and memory over the loaded model's."""
    from mlora.data.preference import Pair
    from mlora.data.record import Sample
    from mlora.engine.engine import Engine
    from mlora.optim.optim_config import OptimConfig
    from peft import LoraConfig

    def sample(prompt: list[int], completion: list[int]) -> Sample:
        return Sample((*prompt, *completion), (*(-100,) * len(prompt), *completion))

    engine = Engine(base(), seed=0)
    before, names = machine.resident("VmRSS"), [f"a{index}" for index in range(ADAPTERS)]
    data = {}
    for index, name in enumerate(names):
        objective = {"name": "dpo", "beta": BETAS[index]}
        optim = OptimConfig(1e-4, "adamw_torch_fused", total_steps=steps + WARM_UP)
        engine.create_adapter(name, LoraConfig(**LORA), optim, objective=objective)
        drawn = pairs(BATCH * (steps + WARM_UP), seed=0 if shared_data else index)
        data[name] = [Pair(sample(p, c), sample(p, r)) for p, c, r in drawn]
    for step in range(steps + WARM_UP):
        if step == WARM_UP:
            begin = time.perf_counter()
        batch = {name: own[BATCH * step : BATCH * (step + 1)] for name, own in data.items()}
        engine.forward_backward(batch, ends=names)
        for name in names:
            engine.optim_step(name)
    return {"seconds": time.perf_counter() - begin, "memory": machine.resident("VmHWM") - before}


def trl(steps: int) -> dict[str, float]:
    """Seconds of the steps of all trainers, and memory over the loaded model's."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class Clock(TrainerCallback):
        """Times the steps after those to warm up."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == WARM_UP:
                self.begin = time.perf_counter()
            elif state.global_step == steps + WARM_UP:
                self.seconds = time.perf_counter() - self.begin

    model = base()
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "examples" / "tiny-base")
    before, seconds = machine.resident("VmRSS"), 0.0
    for index in range(ADAPTERS):
        rows = pairs(BATCH * (steps + WARM_UP), seed=index)
        ids = [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for p, c, r in rows]
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            args = DPOConfig(
                folder,
                beta=BETAS[index],
                max_steps=steps + WARM_UP,
                per_device_train_batch_size=BATCH,
                learning_rate=1e-4,
                train_sampling_strategy="sequential",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                logging_steps=1000,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=False,
            )
            prepare = DPOTrainer._prepare_dataset
            DPOTrainer._prepare_dataset = lambda self, dataset, *_: dataset  # it holds tokens already
            try:
                trainer = DPOTrainer(
                    model=model,
                    args=args,
                    train_dataset=Dataset.from_list(ids),
                    processing_class=tokenizer,
                    peft_config=LoraConfig(**LORA),
                    callbacks=[clock],
                )
            finally:
                DPOTrainer._prepare_dataset = prepare
            trainer.train()
        model = trainer.model.unload()
        seconds += clock.seconds
    return {"seconds": seconds, "memory": machine.resident("VmHWM") - before}


def one(way: str, steps: int, threads: int) -> dict[str, float]:
    """Trains one way in a process of its own."""
    command = [*machine.BENCH, "preferences", "--worker", way, str(steps), str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(options: argparse.Namespace) -> Found:
    """Runs all ways in turns."""
    steps = 5 if options.quick else options.steps
    turns = [{way: one(way, steps, options.threads) for way in WAYS} for _ in range(options.turns)]
    tokens = steps * ADAPTERS * BATCH * 2 * (PROMPT + COMPLETION)
    rows = {}
    for way in WAYS:
        seconds = [turn[way]["seconds"] for turn in turns]
        rows[way] = {
            "tokens_per_second": tokens / statistics.median(seconds),
            "seconds": seconds,
            "memory_mib": statistics.median(turn[way]["memory"] for turn in turns) / 2**20,
        }
    setting = {
        "adapters": ADAPTERS,
        "pairs": BATCH,
        "prompt": PROMPT,
        "completion": COMPLETION,
        "steps": steps,
    }
    columns = (("tokens/s", "tokens_per_second", "9.0f", 1.0), ("MiB", "memory_mib", "6.0f", 1.0))
    return Found({"setting": setting | {"threads": options.threads}, "ways": rows}, table(rows, columns))


def main() -> int:
    """Measures, prints, and writes the results; a process of its own trains one way."""
    if sys.argv[1:2] == ["--worker"]:
        way, steps, threads = sys.argv[2], *map(int, sys.argv[3:])
        start_quietly(threads)
        print(json.dumps(trl(steps) if way == "TRL" else ours(steps, way != "ours")))
        return 0
    return measured(
        __doc__, measure, out="preferences", add=lambda p: p.add_argument("--steps", type=int, default=30)
    )
