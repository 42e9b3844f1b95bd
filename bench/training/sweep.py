"""A sweep of 16 trials on 4 places, against the same trials trained one after the other with PEFT.

    python -m bench sweep                # 2 threads, three turns
    python -m bench sweep --quick        # one turn of few steps; nothing is written

`mlora sweep` is timed as its users run it, from loading the model to the ranked table, with evaluations
before the first and after the last step, checkpoints and saved adapters. PEFT is timed from loading the model
to the last saved adapter, in its fastest plain form: SDPA, fused AdamW, no padding (all sequences are equally
long), evaluated as often, without checkpoints. Both begin with the same weights and see the same batches, so
that the losses after the last step, and with them the ranking, must be the same. They take turns; a ratio is
taken within each turn.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from mlora.cluster.allocators import keep_freed_memory
from mlora.config.config_file import resolve_config
from mlora.config.run_config import RunConfig
from mlora.engine.engine import Engine
from mlora.model.base_info import BaseInfo
from mlora.run.run import train
from mlora.store.run_folder import RunFolder
from mlora.sweep.ranking import RankedTrial, rank_trials
from mlora.tasks.task import Task, TaskBuilder
from peft import PeftModel
from shared import machine
from shared.harness import Found, Target, measured
from shared.shapes import ModelShape, random_llama
from transformers import AutoModelForCausalLM, get_scheduler

LENGTH, SEQUENCES = 32, 1
SHAPE = ModelShape(256, 688, heads=4, kv_heads=4, layers=2, vocabulary=512)
RATES = [2.5e-5, 5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3]
"""None at which training is unstable: there rounding alone decides which loss it ends with."""
RANKS = [4, 16]
PLACES = 4
MUST = 0.75
CLOSE = 1e-4
"""Losses after the last step may differ by so much, relatively: rounding, grown over the steps."""


def save_base(folder: Path) -> None:
    """Llama of 2 layers, hidden 256, random; without a tokenizer, for data of token ids."""
    random_llama(SHAPE, max_position_embeddings=512).save_pretrained(folder)


def write_data(path: Path, count: int, seed: int) -> None:
    """Sequences in which each token follows from the one before, with some noise."""
    draw = random.Random(seed)
    with open(path, "w") as file:
        for _ in range(count):
            ids = [draw.randrange(64)]
            while len(ids) < LENGTH:
                ids.append(draw.randrange(64) if draw.random() < 0.1 else (5 * ids[-1] + 3) % 64)
            file.write(json.dumps({"input_ids": ids}) + "\n")


def sweep_config(folder: Path, steps: int) -> RunConfig:
    """The grid of all learning rates and ranks, over the base and the data of a folder."""
    adapter = {
        "dataset": "train",
        "eval_dataset": "held-out",
        "per_device_train_batch_size": SEQUENCES,
        "max_steps": steps,
        "save_steps": steps // 2,
        "lora": {"lora_alpha": 16, "target_modules": "all-linear"},
    }
    search = {"learning_rate": {"choice": RATES}, "lora": {"r": {"choice": RANKS}}}
    sweep = {"sampler": "grid", "places": PLACES, "adapter": adapter, "search": search}
    data = {
        "base_model": "base",
        "output_dir": "sweep",
        "device": "cpu",
        "datasets": [
            {"name": name, "path": f"{name}.jsonl", "format": "tokens"} for name in ("train", "held-out")
        ],
        "sweep": sweep,
    }
    return resolve_config(data, folder=folder)


def sweep(config: RunConfig) -> tuple[float, list[RankedTrial]]:
    """Run a sweep; returns seconds and its ranked trials."""
    assert config.sweep is not None
    begin = time.perf_counter()
    train(config, overwrite=True)
    trials = rank_trials(RunFolder(config.output_dir), config.sweep)
    return time.perf_counter() - begin, trials


def tasks_of(config: RunConfig, trials: list[RankedTrial]) -> list[Task]:
    """The tasks of a grid's trials, with their data, in the order of the grid."""
    assert config.sweep is not None
    adapters = []
    for trial in sorted(trials, key=lambda trial: trial.name):
        lora = {**config.sweep.adapter["lora"], "r": trial.params["lora.r"]}
        fields = {"learning_rate": trial.params["learning_rate"], "lora": lora, "seed": config.seed}
        adapters.append({**config.sweep.adapter, **fields, "name": trial.name})
    run = RunConfig.model_validate(config.model_dump() | {"sweep": None, "adapters": adapters})
    builder = TaskBuilder(run, BaseInfo(run.base_model, run.base_folder))
    return [builder.build(adapter) for adapter in run.adapters]


def save_starts(config: RunConfig, tasks: list[Task], folder: Path) -> None:
    """Save each trial's adapter as it is before its first step, as a PEFT folder."""
    with Engine(config.base_model) as engine:
        for task in tasks:
            engine.create_adapter(task.name, task.lora, task.optim, seed=task.seed)
            engine.save(task.name, folder / task.name)


def peft(config: RunConfig, tasks: list[Task], starts: Path, saved: Path) -> tuple[float, dict[str, float]]:
    """Train the trials one after the other; returns seconds and the losses after their last steps."""
    begin = time.perf_counter()
    base = AutoModelForCausalLM.from_pretrained(config.base_model)
    losses = {}
    for task in tasks:
        model = PeftModel.from_pretrained(base, starts / task.name, is_trainable=True)
        parameters = [p for p in model.parameters() if p.requires_grad]
        rate = task.optim.learning_rate
        optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0, fused=True)
        schedule = get_scheduler(task.optim.lr_scheduler_type, optimizer, 0, task.total_steps)
        _evaluate(model, task)
        model.train()
        for step in range(task.total_steps):
            ids = torch.tensor([task.data.samples[row].input_ids for row in task.plan.batch(step)])
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, task.optim.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses[task.name] = _evaluate(model, task)
        model.save_pretrained(saved / task.name)
        base = model.unload()
    return time.perf_counter() - begin, losses


@torch.no_grad()
def _evaluate(model: PeftModel, task: Task) -> float:
    assert task.eval_data is not None
    model.eval()
    rows = [sample.input_ids for sample in task.eval_data.samples]
    size, total = task.config.per_device_eval_batch_size, 0.0
    for first in range(0, len(rows), size):
        ids = torch.tensor(rows[first : first + size])
        total += model(input_ids=ids, labels=ids, use_cache=False).loss.item() * len(ids)
    return total / len(rows)


def compare(trials: list[RankedTrial], losses: Mapping[str, float]) -> dict[str, Any]:
    """Whether the rankings are the same, and how far the losses are apart."""
    ours = [trial.name for trial in trials]
    theirs = sorted(losses, key=lambda name: losses[name])
    found = {trial.name: trial.value for trial in trials}
    apart = [abs((found[name] or 0.0) / losses[name] - 1) for name in losses]
    ordered = sorted(losses.values())
    gaps = [after / before - 1 for before, after in pairwise(ordered)]
    return {
        "ranking": ours,
        "peft_ranking": theirs,
        "same_ranking": ours == theirs,
        "losses": {trial.name: trial.value for trial in trials},
        "peft_losses": dict(losses),
        "largest_relative_difference": max(apart),
        "smallest_relative_gap": min(gaps),
    }


def measure(options: argparse.Namespace) -> Found:
    """Measures all turns."""
    steps = 10 if options.quick else options.steps
    with tempfile.TemporaryDirectory() as name:
        return turns_of(Path(name), steps, options.turns)


def turns_of(folder: Path, steps: int, turns: int) -> Found:
    """Runs both ways in turns, with trials of so many steps."""
    save_base(folder / "base")
    write_data(folder / "train.jsonl", 256, 1)
    write_data(folder / "held-out.jsonl", 32, 2)
    config = sweep_config(folder, steps)
    _, first = sweep(config)  # warms up, and says what the trials are
    tasks = tasks_of(config, first)
    save_starts(config, tasks, folder / "starts")
    rows: list[dict[str, Any]] = []
    comparison: dict[str, Any] = {}
    for turn in range(turns):
        with machine.OtherProcesses() as others:
            seconds, trials = sweep(config)
            peft_seconds, losses = peft(config, tasks, folder / "starts", folder / "peft")
        comparison = compare(trials, losses)
        row = {"sweep_seconds": seconds, "peft_seconds": peft_seconds, "ratio": seconds / peft_seconds}
        row["others"] = others.share
        rows.append(row)
        print(f"turn {turn + 1}: {row}", flush=True)
    data = {"trials": len(tasks), "places": PLACES, "steps": steps, "sequences": SEQUENCES, "length": LENGTH}
    ratio = statistics.median(row["ratio"] for row in rows)
    gap = comparison["smallest_relative_gap"]
    must = [
        Target("sweep / PEFT one after the other", ratio, most=MUST),
        Target("the same ranking (1 = yes)", float(comparison["same_ranking"]), least=1),
        Target(
            "largest relative difference of losses", comparison["largest_relative_difference"], most=CLOSE
        ),
    ]
    lines = [str(row) for row in rows] + [f"neighbours in the ranking differ by {gap:.1e} at least"]
    return Found({**data, "turns": rows, "ratio": ratio, **comparison}, lines, must)


def main() -> int:
    """Measures, prints, and writes `results/bench_sweep.json`."""
    keep_freed_memory()  # as `mlora sweep` does; PEFT has it too

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--steps", type=int, default=100, help="of each trial")

    return measured(__doc__, measure, out="bench_sweep", turns=3, add=add)
