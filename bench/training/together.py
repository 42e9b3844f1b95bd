"""Ways to train several adapters on one base: together by `Engine`, or one after the other by PEFT."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from mlora.data.dataset import Sample
from mlora.engine.engine import Engine
from mlora.optim.optim_config import OptimConfig
from peft import LoraConfig
from torch import nn

Step = Callable[[], dict[str, float]]
"""Trains once; tells the seconds of its `passes` and `optimizers`, or nothing."""


def all_linear(rank: int = 16, dropout: float = 0.0) -> LoraConfig:
    """Returns an adapter on all linear layers."""
    return LoraConfig(r=rank, lora_alpha=16, lora_dropout=dropout, target_modules="all-linear")


def together(engine: Engine, lora: LoraConfig, batches: Sequence[Sequence[Sequence[int]]]) -> Step:
    """Returns a step of one adapter for each batch, all in one forward and backward pass."""
    data = {}
    for index, rows in enumerate(batches):
        optim = OptimConfig(1e-4, "adamw_torch_fused", lr_scheduler_type="constant")
        engine.create_adapter(f"adapter{index}", lora, optim)
        data[f"adapter{index}"] = [Sample(tuple(row), tuple(row)) for row in rows]

    def step() -> dict[str, float]:
        begin = time.perf_counter()
        engine.forward_backward(data)
        middle = time.perf_counter()
        for name in data:
            engine.optim_step(name)
        return {"passes": middle - begin, "optimizers": time.perf_counter() - middle}

    return step


def one_by_one(work: Sequence[tuple[nn.Module, str | None, Mapping[str, Any]]]) -> Step:
    """Returns a step of each adapter of PEFT's, as `Trainer` makes it: clipping and fused AdamW.

    Args:
        work: of each adapter its model, its name where the model has several, and its batch.
    """
    owned = []
    for model, name, _ in work:
        model.train()
        named = model.named_parameters()
        mine = [p for key, p in named if p.requires_grad and (name is None or f".{name}." in key)]
        owned.append((mine, torch.optim.AdamW(mine, lr=1e-4, weight_decay=0.0, fused=True)))

    def step() -> dict[str, float]:
        for (model, name, batch), (mine, optimizer) in zip(work, owned, strict=True):
            if name is not None:
                model.set_adapter(name)  # type: ignore[operator]
            model(**batch, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(mine, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return {}

    return step
