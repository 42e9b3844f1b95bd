"""Configs of adapters that exist already, in a folder or in a PEFT model."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from ...adapters.lora_config import START_VALUES, init_kind
from ..targets import target_layers

if TYPE_CHECKING:
    from peft import LoraConfig

_START_FIELDS = {"eva": "eva_config", "corda": "corda_config", "lora_ga": "lora_ga_config"}


def without_start(config: LoraConfig) -> LoraConfig:
    """A copy without how A and B were drawn, where that changed nothing but their first values.

    What changed the base, too, stays, and is refused.
    """
    config, how = copy.deepcopy(config), init_kind(config)
    for kind, field in _START_FIELDS.items():
        if kind != how or kind in START_VALUES:
            setattr(config, field, None)
    if how in START_VALUES:
        config.init_lora_weights = True
    return config


def with_scaling(model: nn.Module, name: str, config: LoraConfig, scaling: Mapping[str, float]) -> LoraConfig:
    """A copy whose `lora_alpha` and `alpha_pattern` say these scalings, so that PEFT's folders hold them.

    Args:
        model: the base model.
        name: of the adapter, for messages.
        config: of the adapter.
        scaling: by layer name; what the adapter sits on beside is left as it is.
    """
    plan = target_layers(model, name, config)
    if all(scaling.get(key, spec.scaling) == spec.scaling for key, spec in plan.items()):
        return config
    alphas = {
        key: scaling.get(key, spec.scaling) * (math.sqrt(spec.rank) if config.use_rslora else spec.rank)
        for key, spec in plan.items()
    }
    config = copy.deepcopy(config)
    config.lora_alpha = Counter(alphas.values()).most_common(1)[0][0]  # type: ignore[assignment]
    # PEFT takes the first pattern that matches the end of a name: longer ones first.
    config.alpha_pattern = {
        re.escape(key): alphas[key]
        for key in sorted(alphas, key=len, reverse=True)
        if alphas[key] != config.lora_alpha
    }
    return config
