"""Training N adapters over one 4-bit base, against PEFT's QLoRA one adapter after the other, in the same run.

    python -m bench quantized                # 2 threads
    python -m bench quantized --quick
    python -m bench quantized --device cuda --out quantized-cuda   # bf16, wider layers

Both quantise the same Llama of random weights with bitsandbytes (nf4, double quantisation). A step is
forward, backward, clipping and fused AdamW for every adapter on its own batch. PEFT keeps its adapters on one
base and pads each batch to its longest sample, as Transformers' collator does; `equal` settings have nothing
to pad. Both take turns and medians are compared. `cpu_ratio` compares the processor time, which other
processes disturb less. `limit` is the ratio that nothing can exceed which computes the base's own products,
`x Wᵀ` and `dy W` of each linear layer, and does all else in no time: both products over dense weights are
timed in the same rounds, for all tokens at once. Memory: the base's bytes, and the peak of a step over it and
over plain fp32 weights.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mlora.cluster.allocators import keep_freed_memory
from mlora.config.sections import QuantizationConfig
from mlora.engine.engine import Engine
from mlora.model.quantization import transformers_config
from peft import get_peft_model
from shared import machine
from shared.counting import live_peak
from shared.harness import Found, measured
from shared.results import dtype_name
from shared.shapes import ModelShape, random_llama
from shared.timing import alternate, medians
from transformers import AutoModelForCausalLM

from mlora_ext.frozen.base_gemm import linear, linear_dx
from training.together import Step, all_linear, one_by_one, together

VOCABULARY = 4096
SHAPE = ModelShape(1024, 2816, heads=16, kv_heads=16, layers=2, vocabulary=VOCABULARY)
NF4 = QuantizationConfig(method="bnb-nf4", double_quant=True)
ON_A_GPU = ModelShape(4096, 11008, heads=32, kv_heads=32, layers=2, vocabulary=VOCABULARY)
SETTINGS: list[tuple[str, int, int, int]] = [
    ("equal", 1, 32, 7),
    ("equal", 2, 64, 5),
    ("equal", 8, 128, 2),
    ("mixed", 4, 128, 3),
    ("mixed", 8, 128, 2),
]
"""Lengths, sequences of an adapter, tokens of the longest one, timed rounds."""
GPU_SETTINGS: list[tuple[str, int, int, int]] = [
    ("equal", 1, 256, 15),
    ("equal", 2, 1024, 15),
    ("equal", 8, 1024, 7),
    ("mixed", 8, 1024, 7),
]
MUST = 1.8
DTYPES = (torch.float32, torch.bfloat16)


def batches(kind: str, adapters: int, sequences: int, longest: int) -> list[list[list[int]]]:
    """Random ids of each adapter. `mixed`: evenly spread lengths, from an eighth of the longest up to it."""
    lengths = [longest] * sequences
    if kind == "mixed":
        lengths = [longest * (1 + 7 * i // max(1, sequences - 1)) // 8 for i in range(sequences)]
    return [[torch.randint(3, VOCABULARY, (n,)).tolist() for n in lengths] for _ in range(adapters)]


def ours(
    folder: Path, data: list[list[list[int]]], quantized: bool = True, **how: Any
) -> tuple[Engine, Step]:
    """One step of all adapters together; `how` names dtype and device."""
    engine = Engine(folder, quantization=NF4 if quantized else None, **how)
    return engine, together(engine, all_linear(), data)


def peft(folder: Path, data: list[list[list[int]]], dtype: torch.dtype, device: str) -> Step:
    """One step of each adapter, one after the other, over one base."""
    how = transformers_config(NF4, dtype)
    base = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=how, dtype=dtype, device_map={"": device}
    )
    names = [f"adapter{index}" for index in range(len(data))]
    model = get_peft_model(base, all_linear(), adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, all_linear())
    for parameter in (p for key, p in model.named_parameters() if "lora_" in key):
        parameter.requires_grad_()
    return one_by_one([(model, name, padded(rows, device)) for name, rows in zip(names, data, strict=True)])


def products(shape: ModelShape, tokens: int, dtype: torch.dtype, device: str) -> Callable[[], None]:
    """The base's products of one step, over dense weights: what no way of training leaves out.

    Nothing below q, k and v of the first decoder layer is trained, so these have no `dy W`.
    """
    layer = [(one.d_in, one.d_out) for one in shape.linears for _ in one.names]
    below = [
        (one.d_in, one.d_out) for one in shape.linears for name in one.names if name in "q_proj k_proj v_proj"
    ]
    head = (shape.hidden, shape.vocabulary)
    weights = {at: torch.randn(at[1], at[0], device=device, dtype=dtype) for at in {*layer, head}}
    rows = {width: torch.randn(tokens, width, device=device, dtype=dtype) for at in weights for width in at}
    forward = [*layer * shape.layers, head]
    backward = list((Counter(forward) - Counter(below)).elements())

    def step() -> None:
        for at in forward:
            linear(rows[at[0]], weights[at])
        for at in backward:
            linear_dx(rows[at[1]], weights[at])

    return step


def padded(rows: list[list[int]], device: str) -> dict[str, torch.Tensor]:
    """A batch as Transformers' collator makes it; without a mask if there is nothing to mask."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
    if mask.all():
        return {"input_ids": ids, "labels": ids}
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def speed(
    folder: Path,
    adapters: int,
    dtype: torch.dtype,
    setting: tuple[str, int, int, int],
    shape: ModelShape,
    device: str,
) -> dict[str, Any]:
    """Returns the row of a setting."""
    kind, sequences, longest, rounds = setting
    data = batches(kind, adapters, sequences, longest)
    engine, step = ours(folder, data, dtype=dtype, device=device)
    tokens = sum(len(row) for each in data for row in each)
    cases = {
        "peft": peft(folder, data, dtype, device),
        "ours": step,
        "products": products(shape, tokens, dtype, device),
    }
    with machine.OtherProcesses() as others:
        found = medians(alternate({name: waited(case, device) for name, case in cases.items()}, rounds))
    engine.close()
    seconds = {name: row["seconds"] for name, row in found.items()}
    busy = {name: row["seconds"] * row["processors"] for name, row in found.items()}
    return {
        "dtype": dtype_name(dtype),
        "lengths": kind,
        "adapters": adapters,
        "sequences": sequences,
        "longest": longest,
        "peft_tokens_per_second": tokens / seconds["peft"],
        "ours_tokens_per_second": tokens / seconds["ours"],
        "ratio": seconds["peft"] / seconds["ours"],
        "cpu_ratio": busy["peft"] / busy["ours"],
        "must": MUST,
        "limit": seconds["peft"] / seconds["products"],
        "other_processes_share": others.share,
    }


def waited(run: Callable[[], object], device: str) -> Callable[[], object]:
    """Returns the function, ended when the device has done what it enqueued."""
    if device == "cpu":
        return run

    def case() -> None:
        run()
        torch.cuda.synchronize()

    return case


def memory(folder: Path, adapters: int) -> dict[str, Any]:
    """The base's bytes, and the peak of a step over it and over plain weights."""
    data = batches("equal", adapters, 1, 32)
    how: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    (nf4, step), (plain, plain_step) = (ours(folder, data, q, **how) for q in (True, False))
    layers = [m for m in nf4.model.modules() if hasattr(m, "frozen")]
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    for one in (step, plain_step):
        one()
    found = {
        "base_bytes": nf4.base_bytes()[0].memory,
        "plain_base_bytes": plain.base_bytes()[0].memory,
        "linear_bytes": sum(layer.frozen.nbytes for layer in layers),
        "bits_per_weight": 8 * sum(layer.frozen.nbytes for layer in layers) / weights,
        "step_peak_bytes": live_peak(step),
        "plain_step_peak_bytes": live_peak(plain_step),
        "largest_layer_bytes": max(4 * layer.in_features * layer.out_features for layer in layers),
    }
    nf4.close()
    plain.close()
    return found | {"dequantised_bytes": found["step_peak_bytes"] - found["plain_step_peak_bytes"]}


def measure(options: argparse.Namespace) -> Found:
    """Measures memory on a CPU, and the speed of every setting."""
    on_cpu, data, lines = options.device == "cpu", {}, []
    shape, settings = (SHAPE, SETTINGS) if on_cpu else (ON_A_GPU, GPU_SETTINGS)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with torch.device(options.device):
            model = random_llama(shape, max_position_embeddings=512 if on_cpu else 1024)
        (model if on_cpu else model.bfloat16()).save_pretrained(folder)
        if on_cpu:
            data["memory"] = found = memory(folder, options.adapters)
            mib = {name: size / 2**20 for name, size in found.items()}
            lines.append(
                f"base {mib['base_bytes']:.1f} MiB in nf4 ({found['bits_per_weight']:.2f} bits a weight), "
                f"{mib['plain_base_bytes']:.1f} in fp32; the peak of a step is "
                f"{mib['dequantised_bytes']:.1f} "
                f"MiB above that over plain weights (the largest layer: {mib['largest_layer_bytes']:.1f} MiB)"
            )
        data["speed"] = rows = []
        for dtype in DTYPES[not on_cpu :]:
            for setting in [("equal", 1, 32, 1)] if options.quick else settings:
                row = speed(folder, options.adapters, dtype, setting, shape, options.device)
                lines.append(
                    f"{row['dtype']:8} {row['lengths']:5} {row['adapters']} x {row['sequences']} x "
                    f"{row['longest']:3d}: PEFT {row['peft_tokens_per_second']:6.0f} tokens/s, together "
                    f"{row['ours_tokens_per_second']:6.0f}, ratio {row['ratio']:.2f}, by processor time "
                    f"{row['cpu_ratio']:.2f} (goal {MUST}, limit {row['limit']:.2f}); others took "
                    f"{row['other_processes_share']} of the machine"
                )
                print(lines[-1], flush=True)
                rows.append(row)
    return Found(data, lines)


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")


def main() -> int:
    """Measures, prints, and writes `results/quantized-cpu`, or another name that is given."""
    keep_freed_memory()
    return measured(__doc__, measure, out="quantized-cpu", add=add)
