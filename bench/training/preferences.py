"""Four DPO adapters in one run, against TRL's `DPOTrainer` training them one after the other.

    .venv-trl/bin/python bench/bench_preferences.py            # `make trl` makes this environment
    .venv-trl/bin/python bench/bench_preferences.py --quick

Each way trains in a process of its own, in turns; medians of the turns are compared. Both train on the same
pairs, all equally long, so that TRL pads nothing. The adapters differ in beta and have data of their own, or
all the same data (as in a search over beta), where equal reference sequences are run once. Tokens are those
of the pairs, without the reference's. Memory is the process's peak resident memory over that with the model
loaded.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from shared import machine
from shared.command_line import documented_parser, start_quietly
from shared.llama import random_llama
from shared.results import RESULTS, write_json
from shared.shapes import ModelShape

SCRIPT = Path(__file__).parents[1] / "bench_preferences.py"
VOCABULARY = 4096
ADAPTERS, BATCH, PROMPT, COMPLETION = 4, 4, 32, 32
BETAS = [0.05, 0.1, 0.2, 0.5]
WARM_UP = 2
WAYS = ("ours", "ours, one data set", "TRL")
LORA = {"r": 16, "lora_alpha": 16, "target_modules": "all-linear"}


def base() -> Any:
    """Llama of 2 layers, hidden 256, random."""
    torch.manual_seed(0)
    shape = ModelShape(256, 688, heads=4, kv_heads=4, layers=2, vocabulary=VOCABULARY)
    return random_llama(shape, max_position_embeddings=512)


def pairs(count: int, seed: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompt, chosen and rejected ids."""
    draw = random.Random(seed)
    sizes = (PROMPT, COMPLETION, COMPLETION)
    return [tuple([draw.randrange(3, VOCABULARY) for _ in range(n)] for n in sizes) for _ in range(count)]  # type: ignore[misc]


def resident() -> int:
    """Bytes of resident memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """The most bytes of resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
    before, names = resident(), [f"a{index}" for index in range(ADAPTERS)]
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
    return {"seconds": time.perf_counter() - begin, "memory": peak() - before}


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
    before, seconds = resident(), 0.0
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
    return {"seconds": seconds, "memory": peak() - before}


def one(way: str, steps: int, threads: int) -> dict[str, float]:
    """Trains one way in a process of its own."""
    command = [sys.executable, str(SCRIPT), "--worker", way, "--steps", str(steps), "--threads", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Runs all ways in turns, prints and writes medians."""
    parser = documented_parser(__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "preferences.json")
    parser.add_argument("--worker", choices=WAYS)
    args = parser.parse_args()
    if args.worker:
        torch.set_num_threads(args.threads)
        warnings.simplefilter("ignore")
        way = args.worker
        print(json.dumps(trl(args.steps) if way == "TRL" else ours(args.steps, way != "ours")))
        return 0
    start_quietly(args.threads)
    if args.quick:
        args.steps, args.turns = 5, 1
    turns = [{way: one(way, args.steps, args.threads) for way in WAYS} for _ in range(args.turns)]
    tokens = args.steps * ADAPTERS * BATCH * 2 * (PROMPT + COMPLETION)
    rows = {}
    for way in WAYS:
        seconds = [turn[way]["seconds"] for turn in turns]
        rows[way] = {
            "tokens_per_second": tokens / statistics.median(seconds),
            "seconds": seconds,
            "memory_mib": statistics.median(turn[way]["memory"] for turn in turns) / 2**20,
        }
        print(f"{way:20} {rows[way]['tokens_per_second']:8.0f} tokens/s {rows[way]['memory_mib']:6.0f} MiB")
    setting = {"adapters": ADAPTERS, "pairs": BATCH, "prompt": PROMPT, "completion": COMPLETION}
    setting |= {"steps": args.steps, "threads": args.threads}
    result = {"machine": machine.describe(), "setting": setting, "ways": rows}
    if not args.quick:
        write_json(args.output, result)
    return 0
