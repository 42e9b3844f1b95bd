"""Checks adapter names and PEFT's `LoraConfig`, field by field."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any

from ..ops.dropout import check_probability
from .trained_parts import check_trained_parts

if TYPE_CHECKING:
    from peft import LoraConfig

_HONOURED = {
    "r",
    "target_modules",
    "exclude_modules",
    "lora_alpha",
    "lora_dropout",
    "fan_in_fan_out",
    "use_rslora",
    "init_lora_weights",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "trainable_token_indices",
}
# Facts about the adapter or its folder; they do not change the result here.
_NEUTRAL = {
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "runtime_config",
    "qalora_group_size",
    "megatron_core",
}
START_VALUES = ("orthogonal", "eva")
"""Values of `init_lora_weights` that only draw A and B. An adapter that has weights to load may have them."""
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def check_name(name: str) -> None:
    """Refuses adapter names that cannot be a file name or part of a state dict key (ValueError)."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"adapter name: expected a non-empty string, got {name!r}")
    if name == "__base__":
        raise ValueError("adapter name: '__base__' is reserved for rows without an adapter")
    if any(bad in name for bad in ("/", "\\", "\0")):
        raise ValueError(f"adapter name {name!r}: expected a plain file name, got a path")
    if "." in name:
        raise ValueError(
            f"adapter name {name!r}: a dot separates modules in PyTorch's state dict keys; use '-' or '_' "
            "instead"
        )


def check_config(name: str, config: LoraConfig) -> None:
    """Refuses every unsupported setting (ValueError with field and value); no field is ignored."""
    from peft import LoraConfig

    _check_start(name, config)
    custom = getattr(config, "_custom_modules", None)
    if custom:
        raise ValueError(
            f"adapter {name!r}: _register_custom_module ({', '.join(k.__name__ for k in custom.values())}) "
            "is not supported; use a config without custom modules"
        )
    default = LoraConfig()
    for item in dataclasses.fields(config):
        if item.name in _HONOURED | _NEUTRAL:
            continue
        value = getattr(config, item.name)
        usual = getattr(default, item.name, None)
        # PEFT itself writes None, {}, [] or False for "not given".
        if value != usual and (value or usual):
            raise ValueError(f"adapter {name!r}: {item.name}={value!r} is not supported")
    check_trained_parts(name, config)
    for field in ("rank_pattern", "alpha_pattern"):
        if not isinstance(getattr(config, field) or {}, dict):
            raise ValueError(f"adapter {name!r}: {field}: expected a dict, got {getattr(config, field)!r}")
    for rank in (config.r, *(config.rank_pattern or {}).values()):
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"adapter {name!r}: r: expected an integer >= 1, got {rank!r}")
    for alpha in (config.lora_alpha, *(config.alpha_pattern or {}).values()):
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise ValueError(f"adapter {name!r}: lora_alpha: expected a finite number, got {alpha!r}")
    check_probability(f"adapter {name!r}: lora_dropout", config.lora_dropout)
    _check_selection(name, config)


def _check_start(name: str, config: LoraConfig) -> None:
    """Refuses unsupported `init_lora_weights`, above all those that change the base model."""
    how = init_kind(config)
    if how in (True, False, "gaussian"):
        return
    reason = "expected True, False or 'gaussian'"
    if how in START_VALUES:
        reason += "; an adapter that was trained with it can be loaded from its folder"
    elif how == "mica":
        reason = "with it PEFT never trains lora_B"
    elif isinstance(how, str) and how.startswith(_CHANGE_THE_BASE):
        reason = (
            "with it PEFT changes base weights, which all adapters share; make a plain LoRA folder with "
            "PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    raise ValueError(
        f"adapter {name!r}: init_lora_weights={config.init_lora_weights!r} is not supported: {reason}"
    )


def _check_selection(name: str, config: LoraConfig) -> None:
    """Refuses target and layer selections on which PEFT's matching of module names would fail."""
    for field in ("target_modules", "exclude_modules"):
        value = getattr(config, field)
        names = value if isinstance(value, list | tuple | set) else [] if value is None else [value]
        if not all(isinstance(item, str) for item in names):
            raise ValueError(f"adapter {name!r}: {field}: expected a pattern or names, got {value!r}")
        try:
            re.compile(value if isinstance(value, str) else "")
        except re.error as error:
            raise ValueError(f"adapter {name!r}: {field}: {value!r} is not a pattern: {error}") from error
    value = config.layers_to_transform
    layers = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(type(item) is int for item in layers):
        raise ValueError(f"adapter {name!r}: layers_to_transform: expected indices, got {value!r}")


def init_kind(config: LoraConfig) -> Any:
    """Returns `init_lora_weights` in lower case, since PEFT ignores case there."""
    how = config.init_lora_weights
    return how.lower() if isinstance(how, str) else how
