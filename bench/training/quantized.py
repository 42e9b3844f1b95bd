"""Training N adapters over one 4-bit base, against PEFT's QLoRA one adapter after the other, in the same run.

    python bench/bench_quantized.py            # 2 threads
    python bench/bench_quantized.py --quick
    python bench/bench_quantized.py --device cuda   # bf16, wider layers

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

import copy
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mlora.cluster.allocators import keep_freed_memory
from mlora.config.quantization_config import QuantizationConfig
from mlora.data.dataset import Sample
from mlora.engine.engine import Engine
from mlora.model.quantization import transformers_config
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig, get_peft_model
from shared import machine
from shared.command_line import documented_parser, start_quietly
from shared.counting import live_peak
from shared.llama import random_llama
from shared.shapes import ModelShape
from transformers import AutoModelForCausalLM

from mlora_ext.frozen.base_gemm import linear, linear_dx

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
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def lora() -> LoraConfig:
    """r = 16 on all linears."""
    return LoraConfig(r=16, lora_alpha=16, target_modules="all-linear")


def batches(kind: str, adapters: int, sequences: int, longest: int) -> list[list[list[int]]]:
    """Random ids of each adapter. `mixed`: evenly spread lengths, from an eighth of the longest up to it."""
    lengths = [longest] * sequences
    if kind == "mixed":
        lengths = [longest * (1 + 7 * i // max(1, sequences - 1)) // 8 for i in range(sequences)]
    return [[torch.randint(3, VOCABULARY, (n,)).tolist() for n in lengths] for _ in range(adapters)]


def ours(
    folder: Path, data: list[list[list[int]]], dtype: torch.dtype, device: str, quantized: bool = True
) -> tuple[Engine, Callable[[], None]]:
    """One step of all adapters together."""
    engine = Engine(folder, device=device, dtype=dtype, quantization=NF4 if quantized else None)
    named = {}
    for index, rows in enumerate(data):
        optim = OptimConfig(1e-4, "adamw_torch_fused", lr_scheduler_type="constant")
        engine.create_adapter(f"adapter{index}", lora(), optim)
        named[f"adapter{index}"] = [Sample(tuple(row), tuple(row)) for row in rows]

    def step() -> None:
        engine.forward_backward(named)
        for name in named:
            engine.optim_step(name)

    return engine, step


def peft(folder: Path, data: list[list[list[int]]], dtype: torch.dtype, device: str) -> Callable[[], None]:
    """One step of each adapter, one after the other, over one base."""
    how = transformers_config(NF4, dtype)
    base = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=how, dtype=dtype, device_map={"": device}
    )
    names = [f"adapter{index}" for index in range(len(data))]
    model = get_peft_model(base, lora(), adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, lora())
    model.train()
    work = []
    for name, rows in zip(names, data, strict=True):
        mine = [p for key, p in model.named_parameters() if f".{name}." in key]
        work.append(
            (name, mine, torch.optim.AdamW(mine, lr=1e-4, weight_decay=0.0, fused=True), padded(rows, device))
        )

    def step() -> None:
        for name, mine, optimizer, batch in work:
            model.set_adapter(name)
            model(**batch, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(mine, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step


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


def in_turn(cases: dict[str, Callable[[], None]], rounds: int) -> dict[str, tuple[float, float]]:
    """Medians of wall and processor seconds; a first round warms up."""
    wall: dict[str, list[float]] = {name: [] for name in cases}
    cpu = copy.deepcopy(wall)
    for turn in range(rounds + 1):
        for name, case in cases.items():
            start, begin = time.perf_counter(), time.process_time()
            case()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - begin)
    return {name: (statistics.median(wall[name]), statistics.median(cpu[name])) for name in cases}


def speed(folder: Path, adapters: int, quick: bool, device: str) -> list[dict[str, Any]]:
    """Every setting in every dtype."""
    rows = []
    on_cpu = device == "cpu"
    settings = SETTINGS if on_cpu else GPU_SETTINGS
    for dtype_name, dtype in list(DTYPES.items())[0 if on_cpu else 1 :]:
        for kind, sequences, longest, rounds in settings[:1] if quick else settings:
            data = batches(kind, adapters, sequences, longest)
            engine, step = ours(folder, data, dtype, device)
            turns = 1 if quick else rounds
            tokens = sum(len(row) for each in data for row in each)
            with machine.OtherProcesses() as others:
                cases = {
                    "peft": peft(folder, data, dtype, device),
                    "ours": step,
                    "products": products(SHAPE if on_cpu else ON_A_GPU, tokens, dtype, device),
                }
                found = in_turn(cases, turns)
            engine.close()
            row = {
                "dtype": dtype_name,
                "lengths": kind,
                "adapters": adapters,
                "sequences": sequences,
                "longest": longest,
                "peft_tokens_per_second": tokens / found["peft"][0],
                "ours_tokens_per_second": tokens / found["ours"][0],
                "ratio": found["peft"][0] / found["ours"][0],
                "cpu_ratio": found["peft"][1] / found["ours"][1],
                "must": MUST,
                "limit": found["peft"][0] / found["products"][0],
                "other_processes_share": others.share,
            }
            print(
                f"{dtype_name:8s} {kind:5s} {adapters} x {sequences} x {longest:3d}: "
                f"PEFT {row['peft_tokens_per_second']:6.0f} tokens/s, "
                f"together {row['ours_tokens_per_second']:6.0f} tokens/s, ratio {row['ratio']:.2f}, "
                f"by processor time {row['cpu_ratio']:.2f} (goal {MUST}, limit {row['limit']:.2f}); "
                f"others took {others.share} of the machine",
                flush=True,
            )
            rows.append(row)
    return rows


def memory(folder: Path, adapters: int) -> dict[str, Any]:
    """The base's bytes, and the peak of a step over it and over plain weights."""
    data = batches("equal", adapters, 1, 32)
    (nf4, step), (plain, plain_step) = (ours(folder, data, torch.float32, "cpu", q) for q in (True, False))
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
    more = found["step_peak_bytes"] - found["plain_step_peak_bytes"]
    found["dequantised_bytes"] = more
    print(
        f"base {found['base_bytes'] / 2**20:.1f} MiB in nf4 ({found['bits_per_weight']:.2f} bits a weight), "
        f"{found['plain_base_bytes'] / 2**20:.1f} MiB in fp32; the peak of a step is {more / 2**20:.1f} MiB "
        f"above that over plain weights (the largest layer dequantised: "
        f"{found['largest_layer_bytes'] / 2**20:.1f} MiB)"
    )
    return found


def main() -> None:
    """Run, print, and write `results/quantized-<device>.json`."""
    parser = documented_parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="one setting; nothing is written")
    arguments = parser.parse_args()
    start_quietly(arguments.threads)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if arguments.device == "cpu":
            random_llama(SHAPE, max_position_embeddings=512).save_pretrained(folder)
            found = {"memory": memory(folder, arguments.adapters)}
        else:
            with torch.device(arguments.device):
                random_llama(ON_A_GPU, max_position_embeddings=1024).bfloat16().save_pretrained(folder)
            found = {}
        found["speed"] = speed(folder, arguments.adapters, arguments.quick, arguments.device)
    if not arguments.quick:
        machine.write(f"quantized-{arguments.device}", found)
