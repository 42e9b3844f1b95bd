"""Training N adapters together, against PEFT training them one after the other, in the same run.

    python -m bench train                # 2 threads, all settings, both dropouts
    python -m bench train --quick

A step is forward, backward, clipping and AdamW for every adapter on its own batch. PEFT runs in its fastest
plain form: SDPA, fused AdamW, gradients dropped to None, no padding (all sequences are equally long). PEFT,
ours, and ours with packed weights (`pack_base`) take turns and medians are compared. Memory is the peak of
one process that trains one way: bytes of live tensors as PyTorch's allocator reports them, and the process's
resident memory over that before training.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import torch
from mlora.cluster.allocators import keep_freed_memory
from mlora.engine.engine import Engine
from peft import get_peft_model
from shared import machine
from shared.counting import live_peak
from shared.harness import QUIET, Found, Panel, Target, measured
from shared.shapes import ModelShape, random_llama
from shared.timing import alternate, medians
from transformers import LlamaForCausalLM

from mlora_ext.frozen.packed import packs
from training.together import Step, all_linear, one_by_one, together

VOCABULARY = 4096
SETTINGS = [(1, 32, 40), (2, 64, 25), (8, 128, 8)]
"""Sequences per adapter, tokens per sequence, timed rounds."""
MUST = {(1, 32): 1.8, (2, 64): 1.5, (8, 128): 1.3}
TRIES = 3
"""A setting is measured again, at most so often, while other processes take too much of the machine."""
MEMORY_SETTING = (8, 128)
MEMORY_MUST = 1.3


def base() -> LlamaForCausalLM:
    """Llama of 2 layers, hidden 256, random."""
    shape = ModelShape(256, 688, heads=4, kv_heads=4, layers=2, vocabulary=VOCABULARY)
    return random_llama(shape, max_position_embeddings=512)


def batches(adapters: int, sequences: int, length: int) -> list[torch.Tensor]:
    """Random ids, one batch per adapter."""
    return [torch.randint(VOCABULARY, (sequences, length)) for _ in range(adapters)]


def ours(dropout: float, ids: list[torch.Tensor], pack_base: bool = False) -> Step:
    """One step of all adapters together."""
    engine = Engine(base(), frozen_weight="packed" if pack_base else "plain")
    return together(engine, all_linear(dropout=dropout), [rows.tolist() for rows in ids])


def peft(dropout: float, ids: list[torch.Tensor]) -> Step:
    """One step of each adapter, one after the other, each with a model of its own."""
    models = [get_peft_model(base(), all_linear(dropout=dropout)) for _ in ids]
    inputs = [{"input_ids": rows, "labels": rows} for rows in ids]
    return one_by_one([(model, None, batch) for model, batch in zip(models, inputs, strict=True)])


def speed(adapters: int, dropout: float, setting: tuple[int, int, int], quick: bool) -> dict[str, Any]:
    """Returns a setting's row."""
    sequences, length, rounds = setting
    ids = batches(adapters, sequences, length)
    cases = {"peft": peft(dropout, ids), "ours": ours(dropout, ids)}
    if packs(torch.empty(1, 1)):
        cases["packed"] = ours(dropout, ids, pack_base=True)
    for _ in range(1 if quick else TRIES):
        with machine.OtherProcesses() as others:
            found = medians(alternate(cases, 3 if quick else rounds, warm_up=3))
        if others.share is None or others.share < QUIET:
            break
    seconds = {name: row["seconds"] for name, row in found.items()}
    tokens = adapters * sequences * length
    return {
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


def memory_of(adapters: int, sequences: int, length: int) -> dict[str, float]:
    """Peak memory of training `adapters` together; run in a process of its own."""
    before = machine.resident("VmRSS")
    step = ours(0.1, batches(adapters, sequences, length))
    for _ in range(3):
        step()
    resident = machine.resident("VmHWM") - before
    return {"step_peak_bytes": live_peak(step), "resident_peak_bytes": resident}


def memory(adapters: int) -> dict[str, Any]:
    """`adapters` together against one adapter with the same total rows."""
    sequences, length = MEMORY_SETTING
    sizes = {"together": (adapters, sequences), "one": (1, adapters * sequences)}
    found: dict[str, Any] = {}
    for name, (count, each) in sizes.items():
        words = ["--memory-of", str(count), str(each), str(length)]
        output = subprocess.run([*machine.BENCH, "train", *words], check=True, capture_output=True, text=True)
        found[name] = json.loads(output.stdout.splitlines()[-1])
    for key in ("step_peak_bytes", "resident_peak_bytes"):
        found[f"{key}_ratio"] = found["together"][key] / found["one"][key]
    return found | {"must": MEMORY_MUST}


def measure(options: argparse.Namespace) -> Found:
    """Measures every setting with and without dropout, and memory."""
    rows, lines, must = [], [], []
    for dropout in (0.0, 0.1):
        for setting in SETTINGS[: 1 if options.quick else None]:
            row = speed(options.adapters, dropout, setting, options.quick)
            name = f"{row['adapters']} x {row['sequences']} x {row['length']:3d}, dropout {dropout}"
            packed = f", packed {row['packed_ratio']:.2f}" if row["packed_ratio"] else ""
            lines.append(
                f"{name}: PEFT {row['peft_tokens_per_second']:7.0f} tokens/s, together "
                f"{row['ours_tokens_per_second']:7.0f}, ratio {row['ratio']:.2f}{packed}; "
                f"others took {row['other_processes_share']} of the machine"
            )
            print(lines[-1], flush=True)
            must.append(Target(f"together / PEFT, {name}", row["ratio"], least=row["must"]))
            rows.append(row)
    peaks = memory(options.adapters)
    mib = [peaks[name]["step_peak_bytes"] / 2**20 for name in ("together", "one")]
    lines.append(
        f"live tensors of a step, {options.adapters} adapters against 1: {mib[0]:.0f} / {mib[1]:.0f} MiB"
    )
    for key in ("step_peak_bytes_ratio", "resident_peak_bytes_ratio"):
        must.append(Target(f"together / one adapter with as many rows, {key}", peaks[key], most=MEMORY_MUST))
    names = [f"{r['adapters']}x{r['sequences']}x{r['length']}, dropout {r['dropout']}" for r in rows]
    ways = {"PEFT, one after the other": "peft", "together": "ours"}
    series = {
        label: {name: row[f"{key}_tokens_per_second"] for name, row in zip(names, rows, strict=True)}
        for label, key in ways.items()
    }
    return Found({"speed": rows, "memory": peaks}, lines, must, [Panel("tokens/s", series)])


def main() -> int:
    """Measures, prints, and writes the results."""
    keep_freed_memory()  # as `mlora train` does; PEFT has it too
    if sys.argv[1:2] == ["--memory-of"]:
        print(json.dumps(memory_of(*map(int, sys.argv[2:]))))
        return 0
    return measured(
        __doc__, measure, out="bench_train", add=lambda p: p.add_argument("--adapters", type=int, default=4)
    )
