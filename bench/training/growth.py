"""How long a step of whole training takes as adapters and layers become more, with the same rows.

    python bench/bench_growth.py                # results/growth-cpu.{json,txt}
    python bench/bench_growth.py --threads 1 --out growth-one-thread

One batch of 256 samples of 16 tokens is shared evenly among 1, 8, 64 or 256 adapters of rank 8, dropout 0.1,
on 2 random blocks of TinyLlama-1.1B's sizes, bf16. A step is forward, backward, and every adapter's optimizer
step (`adamw_torch_fused`), by `Engine`. Then 1, 2 and 4 blocks with 8 adapters. `frozen` is the base's
decoder alone, forward and dX. Cases take turns; medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from mlora.cluster.allocators import keep_freed_memory
from mlora.data.dataset import Sample
from mlora.engine.engine import Engine
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from shared import machine
from shared.command_line import documented_parser, start_quietly
from shared.llama import random_llama
from shared.results import RESULTS, write_json
from shared.shapes import ModelShape
from torch import nn

ADAPTERS, BLOCKS = (1, 8, 64, 256), (1, 2, 4)
SAMPLES, TOKENS, WIDTH, VOCABULARY = 256, 16, 2048, 2048
Case = Callable[[], dict[str, float]]


def model_of(blocks: int) -> nn.Module:
    """Returns a random Llama in bf16."""
    shape = ModelShape(WIDTH, 5632, 32, 4, blocks, VOCABULARY)
    return random_llama(shape).to(torch.bfloat16)


def trained(blocks: int, adapters: int) -> Case:
    """Returns a step of so many adapters, which tells the seconds of each part."""
    engine = Engine(model_of(blocks), dtype=torch.bfloat16)
    names = [f"a{i}" for i in range(adapters)]
    optim = OptimConfig(learning_rate=1e-4, total_steps=10**6, optim="adamw_torch_fused")
    for name in names:
        lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear")
        engine.create_adapter(name, lora, optim)
    rows = torch.randint(VOCABULARY, (SAMPLES, TOKENS)).tolist()
    samples = [Sample(tuple(row), tuple(row)) for row in rows]
    batch = {name: samples[i::adapters] for i, name in enumerate(names)}

    def step() -> dict[str, float]:
        start = time.perf_counter()
        engine.forward_backward(batch)
        middle = time.perf_counter()
        for name in names:
            engine.optim_step(name)
        end = time.perf_counter()
        return {"passes": middle - start, "optimizers": end - middle, "step": end - start}

    return step


def frozen(blocks: int) -> Case:
    """Returns forward and dX of the base's decoder layers, of the same packed rows."""
    base = model_of(blocks).requires_grad_(False)
    x = torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)

    def step() -> dict[str, float]:
        start = time.perf_counter()
        base.model(inputs_embeds=x).last_hidden_state.sum().backward()
        seconds = time.perf_counter() - start
        return {"passes": seconds, "optimizers": 0.0, "step": seconds}

    return step


def measure(cases: dict[str, Case], rounds: int) -> dict[str, dict[str, float]]:
    """Returns medians of milliseconds, of cases that take turns."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, step in cases.items():
            seconds = step()
            if turn:
                found[name].append(seconds)
    return {
        name: {part: 1e3 * statistics.median(one[part] for one in turns) for part in turns[0]}
        for name, turns in found.items()
    }


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default="growth-cpu", help="name in results/, or a path")
    arguments = parser.parse_args()
    start_quietly(arguments.threads)
    keep_freed_memory()  # as `mlora train` does
    info = machine.describe()
    lines = [
        f"{info['processor']}, {arguments.threads} threads, torch {info['torch']}, commit {info['commit']}",
        f"{SAMPLES * TOKENS} rows; median ms",
        f"{'':18} {'passes':>8} {'optimizers':>11} {'step':>8} {'to 8 adapters':>14}",
    ]
    print("\n".join(lines))
    results = {}
    with machine.OtherProcesses() as others:
        for title, cases in (
            ("adapters", {f"{n} adapters": trained(2, n) for n in ADAPTERS} | {"frozen": frozen(2)}),
            ("blocks", {f"{n} blocks": trained(n, 8) for n in BLOCKS}),
        ):
            results[title] = measure(cases, arguments.rounds)
            compared = results[title].get("8 adapters", {}).get("step")
            for name, ms in results[title].items():
                ratio = f"{ms['step'] / compared:14.3f}" if compared else ""
                lines.append(
                    f"{name:18} {ms['passes']:8.1f} {ms['optimizers']:11.1f} {ms['step']:8.1f} {ratio}"
                )
                print(lines[-1], flush=True)
    lines.append(f"other processes took {100 * (others.share or 0):.1f}% of the machine")
    print(lines[-1])
    out = Path(arguments.out) if "/" in arguments.out else RESULTS / arguments.out
    write_json(out.with_suffix(".json"), {"machine": info, "ms": results})
    out.with_suffix(".txt").write_text("\n".join(lines) + "\n")
