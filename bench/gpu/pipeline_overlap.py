"""Two processes, a stage each, on one device: are losses right, and do receive, compute and send overlap?

    python -m torch.distributed.run --standalone --nproc-per-node 2 bench/__main__.py gpu-overlap --out OUT

Each stage is a process; on a GPU both share it, and hidden states travel through pinned memory. Writes the
profiler's trace of each stage (`stage-0.json`, `stage-1.json`: open in Perfetto) and `pipeline.json`: the
share of copies between device and host during which a kernel of the same stage runs. Fails where the losses
of two stages are not those of one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from mlora.cluster.world import World
from mlora.data.dataset import Sample
from mlora.engine.engine import Engine
from mlora.engine.stage_group import StageGroup, StageOptions, stage_of_this_process
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from shared.results import write_json
from shared.shapes import ModelShape, random_llama
from torch.profiler import ProfilerActivity, profile

ADAPTERS, WARM_UP, ROUNDS = 4, 3, 6
TOLERANCE = {"cuda": 2e-2, "cpu": 1e-5}  # of losses: bf16 on a GPU, fp32 on a CPU


def make_base(folder: Path, hidden: int, layers: int) -> None:
    """Save a random Llama."""
    heads = hidden // 64
    random_llama(ModelShape(hidden, 3 * hidden, heads, heads, layers, 1024)).save_pretrained(folder)


def train(engine: Engine, rows: int, rounds: range) -> list[float]:
    """Losses of some rounds, all adapters under way at once."""
    losses = []
    for step in rounds:
        futures = {}
        for name in engine.adapters:
            draw = torch.Generator().manual_seed(1000 * step + int(name[1:]))
            ids = tuple(torch.randint(0, 1024, (rows // 4,), generator=draw).tolist())
            futures[name] = engine.start({name: [Sample(ids, ids)] * 4}, ends=[name])
        for name, future in futures.items():
            result = engine.finish(future)[name]
            losses.append(result.loss_sum / result.tokens)
            engine.optim_step(name)
    return losses


def with_adapters(engine: Engine) -> Engine:
    """The engine with its adapters."""
    for index in range(ADAPTERS):
        lora = LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.1)
        engine.create_adapter(f"a{index}", lora, OptimConfig(1e-4, lr_scheduler_type="constant"))
    return engine


def overlap(events: Sequence[Any]) -> dict[str, float]:
    """Milliseconds of copies and kernels on the device, and the share of copies beside a kernel."""
    device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and e.time_range.end]
    spans = [(e.time_range.start, e.time_range.end, "memcpy" in e.name.lower()) for e in device]
    kernels = sorted((begin, end) for begin, end, copies in spans if not copies)
    copies = [(begin, end) for begin, end, copy in spans if copy]
    both = sum(max(0.0, min(e, end) - max(b, begin)) for b, e in copies for begin, end in kernels)
    copied = sum(end - begin for begin, end in copies)
    return {
        "copies_ms": copied / 1e3,
        "kernels_ms": sum(end - begin for begin, end in kernels) / 1e3,
        "share_of_copies_beside_kernels": both / copied if copied else 0.0,
    }


def main() -> None:
    """Run a stage; the first one compares and writes."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    chosen = options.parse_args()
    world = World.from_launcher()
    if world is None or world.size != 2:
        sys.exit("expected two processes: start this with torch.distributed.run --nproc-per-node 2")
    gpu = chosen.device == "cuda"
    hidden, layers, rows = (2048, 8, 2048) if gpu else (64, 2, 64)
    device = torch.device("cuda:0" if gpu else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        if world.rank == 0:
            make_base(Path(folder), hidden, layers)
        base = world.gather("base", folder)[0]
        part_options = StageOptions(device, torch.bfloat16 if gpu else torch.float32)
        blocks = [layers // 2, layers - layers // 2]
        part, process = stage_of_this_process(base, blocks, part_options, "lorapp", world, in_flight=ADAPTERS)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
        chosen.out.mkdir(parents=True, exist_ok=True)
        with profile(activities=activities) as profiler:
            losses = [] if world.rank else lead(base, StageGroup(process, part, blocks), part_options, rows)
            if world.rank:
                process.serve()
        profiler.export_chrome_trace(str(chosen.out / f"stage-{world.rank}.json"))
        stages = world.gather("overlap", overlap(profiler.events()))
        if world.rank == 0:
            finish(base, part_options, rows, losses, stages, chosen.out / "pipeline.json")


def lead(base: str, stage_group: StageGroup, options: StageOptions, rows: int) -> list[float]:
    """Losses over two stages."""
    engine = with_adapters(Engine(base, device=options.device, dtype=options.dtype, stage_group=stage_group))
    losses = train(engine, rows, range(WARM_UP + ROUNDS))
    engine.close()
    return losses


def finish(
    base: str, options: StageOptions, rows: int, losses: list[float], stages: list[Any], path: Path
) -> None:
    """Compare with one stage, and write what was seen."""
    engine = with_adapters(Engine(base, device=options.device, dtype=options.dtype))
    alone = train(engine, rows, range(WARM_UP + ROUNDS))
    engine.close()
    error = max(abs(a - b) / abs(b) for a, b in zip(losses, alone, strict=True))
    write_json(path, {"largest_loss_error": error, "stages": stages}, indent=2)
    print(path.read_text())
    if not error <= TOLERANCE[options.device.type]:
        sys.exit(f"losses of two stages differ from those of one by {error:.1e}")
