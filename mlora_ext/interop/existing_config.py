"""Adapts the configs of adapters that exist already, in a folder or in a PEFT model."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from ..adapters.kind import one_by_one
from ..adapters.lora_config import NEEDS_DATA, START_VALUES, changes_base, init_kind
from ..targets.find import target_layers

if TYPE_CHECKING:
    from peft import LoraConfig


def without_start(config: LoraConfig) -> LoraConfig:
    """Returns a copy without the initialisation method, if it changed only the first values of A and B.

    One that also changed the base stays in the config; see `changed_base`.
    """
    config, how = copy.deepcopy(config), init_kind(config)
    for kind, field in NEEDS_DATA.items():
        if kind != how or kind in START_VALUES:
            setattr(config, field, None)
    if how in START_VALUES:
        config.init_lora_weights = True
    return config


def changed_base(config: LoraConfig) -> str | None:
    """Returns why an adapter of PEFT is refused whose initialisation has changed its base's weights."""
    if not changes_base(config) and init_kind(config) != "loftq":
        return None
    return (
        f"init_lora_weights={config.init_lora_weights!r} is not supported for an adapter of "
        "PEFT: with it PEFT changes base weights, which all adapters share; make a plain LoRA folder "
        "with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...), or begin anew on "
        "the original base with mlora_ext.convert_model"
    )


def with_scaling(model: nn.Module, name: str, config: LoraConfig, scaling: Mapping[str, float]) -> LoraConfig:
    """Returns a copy whose `lora_alpha` and `alpha_pattern` give these scalings; PEFT folders hold them.

    `scaling` is by name of the layer, or of the parameter; the adapter's other layers keep theirs.
    """
    plan = one_by_one(target_layers(model, name, config))
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
