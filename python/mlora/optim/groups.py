"""Which of an adapter's Parameters share a learning rate and a weight decay, as in Trainer and LoRA+."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mlora.optim.optim_config import EMBEDDING_RATE, OptimConfig

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Trainer's patterns of names without weight decay."""


@dataclass(frozen=True)
class Group:
    """Parameters with one learning rate and one weight decay.

    Attributes:
        factor: their learning rate, as a factor on the adapter's.
    """

    factor: float
    weight_decay: float


def group_of(name: str, parameter: Tensor, config: OptimConfig) -> Group:
    """Returns the group of a Parameter.

    With `loraplus_lr_ratio` the groups are those of PEFT's `create_loraplus_optimizer` (LoRA+: Hayou et al.,
    arXiv 2402.12354): LoRA on embeddings has a rate of its own, B and vectors that of A times the ratio.
    """
    decay = 0.0 if _NO_DECAY.search(name) else config.weight_decay
    if config.loraplus_lr_ratio is None:
        return Group(1.0, decay)
    if "lora_embedding_" in name:
        rate = EMBEDDING_RATE if config.loraplus_lr_embedding is None else config.loraplus_lr_embedding
        return Group(rate / config.learning_rate, decay)
    return Group(config.loraplus_lr_ratio if "lora_B" in name or parameter.ndim == 1 else 1.0, decay)


def groups_of(parameters: Mapping[str, Tensor], config: OptimConfig) -> dict[Group, set[int]]:
    """Returns the indices of the Parameters of each group."""
    found: dict[Group, set[int]] = {}
    for index, (name, parameter) in enumerate(parameters.items()):
        found.setdefault(group_of(name, parameter, config), set()).add(index)
    return found
