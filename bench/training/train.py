"""Training N adapters together, against PEFT training them one after the other, in the same run.

    python bench/bench_train.py                # 2 threads, all settings, both dropouts
    python bench/bench_train.py --quick

A step is forward, backward, clipping and AdamW for every adapter on its own batch. PEFT runs in its fastest
plain form: SDPA, fused AdamW, gradients dropped to None, no padding (all sequences are equally long). PEFT,
ours, and ours with packed weights (`pack_base`) take turns and medians are compared. Memory is the peak of
one process that trains one way: bytes of live tensors as PyTorch's allocator reports them, and the process's
resident memory over that before training.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mlora.cluster.allocators import keep_freed_memory
from mlora.data.dataset import Sample
from mlora.engine.engine import Engine
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig, get_peft_model
from shared import machine
from shared.command_line import documented_parser, start_quietly
from shared.counting import live_peak
from shared.figures import figure
from shared.llama import random_llama
from shared.results import RESULTS
from shared.shapes import ModelShape
from shared.timing import medians
from transformers import LlamaForCausalLM

from mlora_ext.frozen.packed import packs

SCRIPT = Path(__file__).parents[1] / "bench_train.py"
VOCABULARY = 4096
SETTINGS = [(1, 32, 40), (2, 64, 25), (8, 128, 8)]
"""Sequences per adapter, tokens per sequence, timed rounds."""
MUST = {(1, 32): 1.8, (2, 64): 1.5, (8, 128): 1.3}
QUIET, TRIES = 0.05, 3
"""A setting is measured again, at most so often, while other processes take more of the machine than this."""
MEMORY_SETTING = (8, 128)
MEMORY_MUST = 1.3


def base() -> LlamaForCausalLM:
    """Llama of 2 layers, hidden 256, random."""
    shape = ModelShape(256, 688, heads=4, kv_heads=4, layers=2, vocabulary=VOCABULARY)
    return random_llama(shape, max_position_embeddings=512)


def lora(dropout: float) -> LoraConfig:
    """r = 16 on all linears."""
    return LoraConfig(r=16, lora_alpha=16, lora_dropout=dropout, target_modules="all-linear")


def batches(adapters: int, sequences: int, length: int) -> list[torch.Tensor]:
    """Random ids, one batch per adapter."""
    return [torch.randint(VOCABULARY, (sequences, length)) for _ in range(adapters)]


def ours(dropout: float, ids: list[torch.Tensor], pack_base: bool = False) -> Callable[[], None]:
    """One step of all adapters together."""
    engine = Engine(base(), frozen_weight="packed" if pack_base else "plain")
    data = {}
    for index, rows in enumerate(ids):
        name = f"adapter{index}"
        optim = OptimConfig(1e-4, "adamw_torch_fused", lr_scheduler_type="constant")
        engine.create_adapter(name, lora(dropout), optim)
        data[name] = [Sample(tuple(row), tuple(row)) for row in rows.tolist()]

    def step() -> None:
        engine.forward_backward(data)
        for name in data:
            engine.optim_step(name)

    return step


def peft(dropout: float, ids: list[torch.Tensor]) -> Callable[[], None]:
    """One step of each adapter, one after the other, as `Trainer` does it."""
    models = [get_peft_model(base(), lora(dropout)) for _ in ids]
    parameters = [[p for p in model.parameters() if p.requires_grad] for model in models]
    optimizers = [torch.optim.AdamW(mine, lr=1e-4, weight_decay=0.0, fused=True) for mine in parameters]
    for model in models:
        model.train()

    def step() -> None:
        for model, mine, optimizer, rows in zip(models, parameters, optimizers, ids, strict=True):
            model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(mine, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step


def speed(adapters: int, quick: bool) -> list[dict[str, Any]]:
    """Every setting with and without dropout."""
    rows = []
    for dropout in (0.0, 0.1):
        for sequences, length, rounds in SETTINGS:
            ids = batches(adapters, sequences, length)
            cases = {"peft": peft(dropout, ids), "ours": ours(dropout, ids)}
            if packs(torch.empty(1, 1)):
                cases["packed"] = ours(dropout, ids, pack_base=True)
            for _ in range(1 if quick else TRIES):
                with machine.OtherProcesses() as others:
                    seconds = medians(cases, 3 if quick else rounds)
                if others.share is None or others.share < QUIET:
                    break
            tokens = adapters * sequences * length
            row = {
                "adapters": adapters,
                "sequences": sequences,
                "length": length,
                "dropout": dropout,
                "peft_tokens_per_second": tokens / seconds["peft"],
                "ours_tokens_per_second": tokens / seconds["ours"],
                "ratio": seconds["peft"] / seconds["ours"],
                "packed_ratio": seconds["peft"] / seconds["packed"] if "packed" in seconds else None,
                "must": MUST[sequences, length],
                "other_processes_share": others.share,
            }
            packed = f", packed {row['packed_ratio']:.2f}" if row["packed_ratio"] else ""
            print(
                f"{adapters} x {sequences} x {length:3d}, dropout {dropout}: "
                f"PEFT {row['peft_tokens_per_second']:7.0f} tokens/s, "
                f"together {row['ours_tokens_per_second']:7.0f} tokens/s, "
                f"ratio {row['ratio']:.2f} (must {row['must']}){packed}; "
                f"others took {others.share} of the machine"
            )
            rows.append(row)
    return rows


def memory_of(adapters: int, sequences: int, length: int) -> dict[str, float]:
    """Peak memory of training `adapters` together; run in a process of its own."""
    before = _resident()
    step = ours(0.1, batches(adapters, sequences, length))
    for _ in range(3):
        step()
    resident = _resident_peak() - before
    return {"step_peak_bytes": live_peak(step), "resident_peak_bytes": resident}


def memory(adapters: int) -> dict[str, Any]:
    """`adapters` together against one adapter with the same total rows."""
    sequences, length = MEMORY_SETTING
    sizes = {"together": (adapters, sequences), "one": (1, adapters * sequences)}
    found: dict[str, Any] = {}
    for name, (count, each) in sizes.items():
        command = [sys.executable, SCRIPT, "--memory-of", str(count), str(each), str(length)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found[name] = json.loads(output.splitlines()[-1])
    for key in ("step_peak_bytes", "resident_peak_bytes"):
        found[f"{key}_ratio"] = found["together"][key] / found["one"][key]
    found["must"] = MEMORY_MUST
    mib = {name: found[name]["step_peak_bytes"] / 2**20 for name in sizes}
    print(
        f"peak memory, {adapters} adapters against 1 with the same rows: live tensors of a step "
        f"{mib['together']:.0f} / {mib['one']:.0f} MiB = {found['step_peak_bytes_ratio']:.2f}, "
        f"resident memory {found['resident_peak_bytes_ratio']:.2f} (must be below {MEMORY_MUST})"
    )
    return found


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of tokens per second."""
    labels = [f"{r['adapters']}x{r['sequences']}x{r['length']}\ndropout {r['dropout']}" for r in rows]
    with figure(path, dpi=120, figsize=(9, 4)) as (drawn, axes):
        for shift, key, name in ((-0.2, "peft", "PEFT, one after the other"), (0.2, "ours", "together")):
            places = [index + shift for index in range(len(rows))]
            bars = axes.bar(places, [r[f"{key}_tokens_per_second"] for r in rows], 0.4, label=name)
            if key == "ours":
                axes.bar_label(bars, [f"{r['ratio']:.2f}x" for r in rows])
        axes.set_xticks(range(len(rows)), labels, fontsize=8)
        axes.set_ylabel("tokens/s")
        axes.legend()
        drawn.tight_layout()


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _resident_peak() -> int:
    """Not `ru_maxrss`: across fork and exec, that is at least the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    """Run, print, and write `results/bench_train.json` and `.png`."""
    parser = documented_parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="few rounds; nothing is written")
    parser.add_argument("--memory-of", type=int, nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    start_quietly(arguments.threads)
    keep_freed_memory()  # as `mlora train` does; PEFT has it too
    if arguments.memory_of:
        print(json.dumps(memory_of(*arguments.memory_of)))
        return
    rows = speed(arguments.adapters, arguments.quick)
    peaks = memory(arguments.adapters)
    if not arguments.quick:
        machine.write("bench_train", {"speed": rows, "memory": peaks})
        plot(rows, RESULTS / "bench_train.png")
