"""A step of 16 adapters over a mixture of 128 small experts, on attention alone and on the experts, too.

    python -m bench experts --turns 3               # results/experts-cpu.{json,txt}

A random Qwen3-MoE of 2 blocks: width 256, 128 experts of width 128, 8 of them for each token; fp32. Each
adapter has one sample of 32 tokens and rank 4, on `q_proj` and `v_proj`, or also on `experts.gate_up_proj`
and `experts.down_proj`. A step is forward, backward, clipping and every adapter's fused AdamW step: by
`Engine`, with one batch for all, and by PEFT, with one batch for each (one adapter of PEFT's stands for all
16: the cost is the same). Cases take turns; medians.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from mlora.engine.engine import Engine
from peft import LoraConfig, get_peft_model
from shared.harness import SECONDS, Found, measured, table
from shared.timing import alternate, medians, ratio
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from training.together import Step, one_by_one, together

ADAPTERS, TOKENS, VOCABULARY = 16, 32, 2048
ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
OURS, PEFT = "together, attention", "PEFT one by one, attention"


def model(experts: int) -> nn.Module:
    """Returns a random mixture."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_experts=experts,
        num_experts_per_tok=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
    )
    return Qwen3MoeForCausalLM(config)


def cases_of(experts: int) -> dict[str, Step]:
    """Returns the steps of both libraries, on attention and on experts, too."""
    rows = torch.randint(VOCABULARY, (ADAPTERS, TOKENS), generator=torch.Generator().manual_seed(1))
    inputs = [{"input_ids": row[None], "labels": row[None]} for row in rows]
    found: dict[str, Step] = {}
    for more, parameters in (("", None), (" and experts", EXPERTS)):
        lora = LoraConfig(r=4, target_modules=ATTENTION, target_parameters=parameters)
        found[OURS + more] = together(Engine(model(experts)), lora, [[row] for row in rows.tolist()])
        peft = get_peft_model(model(experts), lora)
        peft_step = [one_by_one([(peft, None, batch)]) for batch in inputs]
        found[PEFT + more] = partial(all_of, peft_step)
    return found


def all_of(steps: list[Step]) -> dict[str, float]:
    """Runs steps one after the other."""
    for step in steps:
        step()
    return {}


def measure(options: argparse.Namespace) -> Found:
    """Measures all cases."""
    turns = alternate(cases_of(16 if options.quick else 128), options.turns)
    rows = {
        name: row
        | {"rate": ADAPTERS * TOKENS / row["seconds"], "slowest": max(t[name]["seconds"] for t in turns)}
        for name, row in medians(turns).items()
    }
    columns = (*SECONDS, ("tokens/s", "rate", "9.0f", 1.0), ("slowest", "slowest", "9.1f", 1e3))
    ours, theirs = f"{OURS} and experts", f"{PEFT} and experts"
    lines = [
        *table(rows, columns),
        f"experts beside attention alone: {ratio(turns, ours, OURS):.2f}x the time",
        f"PEFT one by one beside together: {ratio(turns, theirs, ours):.1f}x the time",
    ]
    return Found({"seconds": {name: [turn[name]["seconds"] for turn in turns] for name in rows}}, lines)


def main() -> int:
    """Measures, prints, and writes the results."""
    return measured(__doc__, measure, out="experts-cpu", threads=1)
