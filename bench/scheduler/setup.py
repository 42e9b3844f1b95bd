"""What the benchmark of the scheduler trains: small random models in a folder, and tasks of random tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mlora.config.config_file import resolve_config
from mlora.config.run_config import RunConfig
from shared.llama import random_llama
from shared.shapes import ALL_LINEAR, ModelShape
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

KINDS: tuple[dict[str, Any], ...] = (
    {"r": 8, "lora_dropout": 0.1, "target_modules": list(ALL_LINEAR)},
    {"r": 16, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]},
    {"r": 4, "target_modules": list(ALL_LINEAR)},
)
"""Adapters of tasks in turn: three kinds, which make mixtures of their own."""


@dataclass(frozen=True)
class Shape:
    """A model's sizes.

    Attributes:
        hidden: D.
        blocks: decoder blocks.
        vocabulary: tokens.
        window: of every layer's attention; none = the whole sequence.
    """

    hidden: int
    blocks: int = 6
    vocabulary: int = 8000
    window: int | None = None

    @property
    def name(self) -> str:
        """Such as `hidden 256` or `hidden 256, window 48`."""
        return f"hidden {self.hidden}" + (f", window {self.window}" if self.window else "")

    def make(self) -> PreTrainedModel:
        """A random model, the same for the same sizes."""
        shape = ModelShape(
            self.hidden,
            intermediate=11 * self.hidden // 4,
            heads=max(1, self.hidden // 64),
            kv_heads=max(1, self.hidden // 128),
            layers=self.blocks,
            vocabulary=self.vocabulary,
        )
        if not self.window:
            return random_llama(shape, max_position_embeddings=4096)
        torch.manual_seed(0)
        options = shape.options | {"max_position_embeddings": 4096, "sliding_window": self.window}
        return MistralForCausalLM(MistralConfig(**options))


@dataclass(frozen=True)
class Work:
    """What tasks train; each has samples of its own.

    Attributes:
        tasks: how many.
        batch: sequences of a micro-batch.
        shortest: rows of a sequence at least.
        longest: and at most, evenly spread between.
        steps: of each task.
        samples: of each task.
    """

    tasks: int
    batch: int
    shortest: int
    longest: int
    steps: int
    samples: int = 256


def make_config(
    base: Path, out: Path, work: Work, *, limit: int | None, checkpointing: bool = False
) -> RunConfig:
    """A run's config; its data sets are written beside `out`.

    Args:
        base: folder of the base model.
        out: the run's folder, which need not be there.
        work: what the tasks train.
        limit: on memory, in bytes; none = there is none.
        checkpointing: `gradient_checkpointing`.

    Returns:
        The config, of tasks `t0`, `t1` and so on, whose last steps nobody is meant to reach.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    names = [f"t{number}" for number in range(work.tasks)]
    vocabulary = json.loads((base / "config.json").read_text())["vocab_size"]
    for number, name in enumerate(names):
        lines = [json.dumps({"input_ids": ids}) for ids in token_rows(work, vocabulary, seed=number)]
        (out.parent / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    data = {
        "base_model": str(base),
        "output_dir": str(out),
        "device": "cpu",
        "gradient_checkpointing": checkpointing,
        "defaults": {
            "max_steps": work.steps,
            "per_device_train_batch_size": work.batch,
            "save_steps": None,
            "learning_rate": 1e-4,
        },
        "datasets": [{"name": name, "path": f"{name}.jsonl", "format": "tokens"} for name in names],
        "adapters": [
            {"name": name, "dataset": name, "lora": KINDS[number % len(KINDS)]}
            for number, name in enumerate(names)
        ],
        "scheduler": {"memory_limit": limit},
    }
    return resolve_config(data, folder=out.parent)


def token_rows(work: Work, vocabulary: int, seed: int) -> list[list[int]]:
    """Random ids of a task's samples, the longest length among them."""
    draw = random.Random(seed)
    lengths = [work.longest, *(draw.randint(work.shortest, work.longest) for _ in range(work.samples - 1))]
    return [[draw.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


def random_lengths(count: int, work: Work, seed: int, names: Sequence[str]) -> list[dict[str, list[int]]]:
    """Micro-batches of sequences of random lengths, every fourth one of equally long sequences.

    Args:
        count: of micro-batches.
        work: lengths from its shortest to its longest, one sequence to `batch` ones of a task.
        seed: of the draw.
        names: the tasks, all of which take part in each.

    Returns:
        The lengths of each micro-batch by task.
    """
    draw = random.Random(seed)
    found = []
    for place in range(count):
        same = draw.randint(work.shortest, work.longest)
        found.append(
            {
                name: [
                    same if place % 4 == 3 else draw.randint(work.shortest, work.longest)
                    for _ in range(draw.randint(1, work.batch))
                ]
                for name in names
            }
        )
    return found
