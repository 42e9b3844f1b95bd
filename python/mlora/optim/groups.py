"""Which of an adapter's Parameters share a learning rate and a weight decay, as in Trainer and LoRA+."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from mlora.optim.optim_config import EMBEDDING_RATE, OptimConfig

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Trainer's patterns of lower-case names without weight decay."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with one learning rate and one weight decay.

    Attributes:
        factor: their learning rate, as a factor on the adapter's.
    """

    factor: float
    weight_decay: float


def group_of(
    name: str, parameter: Tensor, config: OptimConfig, *, layer_norm: bool = False
) -> ParameterGroup:
    """Returns the group of a Parameter.

    With `loraplus_lr_ratio` the groups are those of PEFT's `create_loraplus_optimizer` (LoRA+: Hayou et al.,
    arXiv 2402.12354): LoRA on embeddings has a rate of its own, B and vectors that of A times the ratio.

    Args:
        name: of the Parameter, without its adapter's name.
        parameter: the Parameter.
        config: the adapter's settings.
        layer_norm: whether it belongs to an `nn.LayerNorm`; those have no weight decay.
    """
    spared = layer_norm or _NO_DECAY.search(name.lower())
    decay = 0.0 if spared else config.weight_decay
    if config.loraplus_lr_ratio is None:
        return ParameterGroup(1.0, decay)
    if "lora_embedding_" in name:
        rate = EMBEDDING_RATE if config.loraplus_lr_embedding is None else config.loraplus_lr_embedding
        return ParameterGroup(rate / config.learning_rate, decay)
    return ParameterGroup(config.loraplus_lr_ratio if "lora_B" in name or parameter.ndim == 1 else 1.0, decay)


def groups_of(
    parameters: Mapping[str, Tensor], config: OptimConfig, layer_norms: Collection[int] = ()
) -> dict[ParameterGroup, set[int]]:
    """Returns the indices of the Parameters of each group; `layer_norms` are those of `nn.LayerNorm`."""
    found: dict[ParameterGroup, set[int]] = {}
    for index, (name, parameter) in enumerate(parameters.items()):
        group = group_of(name, parameter, config, layer_norm=index in layer_norms)
        found.setdefault(group, set()).add(index)
    return found


def layer_norms_among(parameters: Collection[Tensor], model: nn.Module) -> set[int]:
    """Returns the indices of the Parameters that belong to an `nn.LayerNorm` of the model.

    `Trainer.get_decay_parameter_names` knows these by type, whatever they are called, such as GPT-2's `ln_f`.
    It knows other norms by name only.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    own = {id(parameter) for norm in norms for parameter in norm.parameters()}
    return {index for index, parameter in enumerate(parameters) if id(parameter) in own}
