"""A step of 16 adapters over a mixture of 128 small experts, on attention alone and on the experts, too.

    python bench/bench_experts.py               # results/experts-cpu.{json,txt}

A random Qwen3-MoE of 2 blocks: width 256, 128 experts of width 128, 8 of them for each token; fp32. Each
adapter has one sample of 32 tokens and rank 4, on `q_proj` and `v_proj`, or also on `experts.gate_up_proj`
and `experts.down_proj`. A step is forward, backward, and every adapter's AdamW step: by `Engine`, with one
batch for all, and by PEFT, with one batch for each (one adapter of PEFT's stands for all 16: the cost is the
same). Cases take turns; medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from mlora.data.dataset import Sample
from mlora.engine.engine import Engine
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig, get_peft_model
from shared import machine
from shared.command_line import documented_parser, start_quietly
from shared.results import RESULTS, write_json
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

ADAPTERS, TOKENS, VOCABULARY = 16, 32, 2048
ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
Step = Callable[[], object]


def model() -> nn.Module:
    """Returns a random mixture."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
    )
    return Qwen3MoeForCausalLM(config)


def lora(experts: bool) -> LoraConfig:
    """Returns an adapter's config."""
    return LoraConfig(r=4, target_modules=ATTENTION, target_parameters=EXPERTS if experts else None)


def rows() -> list[list[int]]:
    """Returns one sample for each adapter."""
    generator = torch.Generator().manual_seed(1)
    found: list[list[int]] = torch.randint(VOCABULARY, (ADAPTERS, TOKENS), generator=generator).tolist()
    return found


def together(experts: bool) -> Step:
    """Returns a step of all adapters by `Engine`."""
    engine, names = Engine(model()), [f"a{i}" for i in range(ADAPTERS)]
    for name in names:
        engine.create_adapter(name, lora(experts), OptimConfig(1e-4, total_steps=10**6))
    batch = {name: [Sample(tuple(row), tuple(row))] for name, row in zip(names, rows(), strict=True)}

    def step() -> None:
        engine.forward_backward(batch)
        for name in names:
            engine.optim_step(name)

    return step


def one_by_one(experts: bool) -> Step:
    """Returns as many steps of one adapter by PEFT as there are adapters."""
    peft = get_peft_model(model(), lora(experts))
    optimizer = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=1e-4)
    samples = [torch.tensor([row]) for row in rows()]

    def step() -> None:
        for ids in samples:
            peft(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


CASES: dict[str, Callable[[], Step]] = {
    "together, attention": lambda: together(False),
    "together, attention and experts": lambda: together(True),
    "PEFT one by one, attention": lambda: one_by_one(False),
    "PEFT one by one, attention and experts": lambda: one_by_one(True),
}


def main() -> int:
    """Runs all cases and writes the results."""
    parser = documented_parser(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", default="experts-cpu", help="name of the files in bench/results")
    options = parser.parse_args()
    start_quietly(options.threads)
    steps = {name: make() for name, make in CASES.items()}
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    with machine.OtherProcesses() as others:
        for _ in range(options.turns):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - start)
    write_results(options.out, times, others.share)
    return 0


def write_results(name: str, times: dict[str, list[float]], others: float | None) -> None:
    """Prints and writes medians, and how they compare."""
    info = machine.describe()
    seconds = {name: statistics.median(found) for name, found in times.items()}
    lines = [
        f"{info['processor']}, torch {info['torch']}, commit {info['commit']}",
        f"{'case':40} {'ms a step':>10} {'tokens/s':>10} {'slowest':>10}",
    ]
    for case, median in seconds.items():
        slowest = 1e3 * max(times[case])
        lines.append(f"{case:40} {1e3 * median:10.1f} {ADAPTERS * TOKENS / median:10.0f} {slowest:10.1f}")
    ours = seconds["together, attention and experts"]
    lines.append(f"experts beside attention alone: {ours / seconds['together, attention']:.2f}x the time")
    theirs = seconds["PEFT one by one, attention and experts"]
    lines.append(f"PEFT one by one beside together: {theirs / ours:.1f}x the time")
    lines.append(f"other processes took {100 * (others or 0):.0f}% of the machine")
    text = "\n".join(lines)
    print(text)
    write_json(RESULTS / f"{name}.json", {"machine": info, "others": others, "seconds": times})
    (RESULTS / f"{name}.txt").write_text(text + "\n")
