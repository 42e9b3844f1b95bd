"""One adapter's optimizer settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlora.optim.registry import missing_package, optimizer_names

LARGEST = {"learning_rate": 1e30, "weight_decay": 1e6}
"""Larger values, and their product, are beyond fp32, which PyTorch refuses in the midst of a step."""
EMBEDDING_RATE = 1e-6
"""PEFT's default of `loraplus_lr_embedding`."""


@dataclass(frozen=True)
class OptimConfig:
    """One adapter's optimizer settings. Names and defaults are those of `transformers.TrainingArguments`.

    Attributes:
        learning_rate: peak learning rate.
        optim: a name of `mlora.optim.registry`.
        weight_decay: decoupled for AdamW; applies to every adapter weight.
        max_grad_norm: bound of the gradient's norm; 0 = no clipping.
        lr_scheduler_type: a name of `transformers.SchedulerType` that is a function of the step.
        lr_scheduler_kwargs: further arguments of the schedule.
        warmup_steps: steps of linear warm-up.
        total_steps: steps after which the schedule ends; needed by schedules that end.
        loraplus_lr_ratio: LoRA+: the learning rate of B over that of A; None = they have the same.
        loraplus_lr_embedding: LoRA+: the learning rate of LoRA on embeddings; None = PEFT's 1e-6.
    """

    learning_rate: float = 5e-5
    optim: str = "adamw_torch_fused"
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: Mapping[str, Any] | None = field(default=None)
    warmup_steps: int = 0
    total_steps: int | None = None
    loraplus_lr_ratio: float | None = None
    loraplus_lr_embedding: float | None = None

    def __post_init__(self) -> None:
        if self.optim not in optimizer_names():
            raise ValueError(f"optim: expected one of {', '.join(optimizer_names())}, got {self.optim!r}")
        if package := missing_package(self.optim):
            raise ValueError(f"optim: {self.optim!r} needs the package {package}: pip install {package}")
        for name in ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "warmup_steps"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: expected a finite number >= 0, got {value!r}")
            if value > LARGEST.get(name, math.inf):
                raise ValueError(f"{name}: expected at most {LARGEST[name]:g}, got {value}")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a number with 0 <= value < 1, got {getattr(self, name)}")
        self._check_loraplus()

    def _check_loraplus(self) -> None:
        for name in ("loraplus_lr_ratio", "loraplus_lr_embedding"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: expected a finite number > 0, got {value!r}")
        fault = loraplus_fault(self.learning_rate, self.loraplus_lr_ratio, self.loraplus_lr_embedding)
        if fault:
            raise ValueError(f"{fault[0]}: {fault[1]}")


def loraplus_fault(
    learning_rate: float, ratio: float | None, embedding: float | None
) -> tuple[str, str] | None:
    """Returns the field of LoRA+ that does not fit the others, and why."""
    if ratio is None:
        return (embedding and ("loraplus_lr_embedding", "needs loraplus_lr_ratio beside it")) or None
    if learning_rate == 0:
        return "loraplus_lr_ratio", "needs a learning_rate > 0"
    for name, rate in (("loraplus_lr_ratio", ratio * learning_rate), ("loraplus_lr_embedding", embedding)):
        if rate is not None and rate > LARGEST["learning_rate"]:
            return name, f"the learning rate {rate:g} is beyond {LARGEST['learning_rate']:g}"
    return None
