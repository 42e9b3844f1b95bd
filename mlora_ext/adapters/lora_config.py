"""Which adapters are supported: names, and PEFT's LoraConfig field by field."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any

from ..ops.dropout import check_probability

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
}
# Facts about the adapter or its folder that do not change what it computes here.
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
"""PEFT's ways to draw A and B that change nothing else: of no matter once there are weights to load."""
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_TRAINED_HEADS = {"SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS"}


def check_name(name: str) -> None:
    """Refuse adapter names that cannot be a file name or part of a state dict key.

    Raises:
        ValueError: saying what is wrong with the name.
    """
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


def check_kind(name: str, config: object) -> None:
    """Refuse what is not PEFT's own `LoraConfig`, whose fields are known.

    Raises:
        ValueError: naming the adapter and the type.
    """
    from peft import LoraConfig

    if type(config) is not LoraConfig:
        raise ValueError(f"adapter {name!r}: expected a peft.LoraConfig, got {type(config).__name__}")


def check_config(name: str, config: LoraConfig) -> None:
    """Refuse what is not supported, field by field: nothing in a config is ignored.

    Raises:
        ValueError: naming the adapter, the field and its value.
    """
    from peft import LoraConfig

    check_kind(name, config)
    _check_start(name, config)
    custom = getattr(config, "_custom_modules", None)
    if custom:
        raise ValueError(
            f"adapter {name!r}: _register_custom_module ({', '.join(k.__name__ for k in custom.values())}) "
            "is not supported, since nobody knows here what such layers compute; give a config without it"
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
    if config.task_type in _TRAINED_HEADS:
        raise ValueError(
            f"adapter {name!r}: task_type={str(config.task_type)!r} is not supported: PEFT would train the "
            "model's head beside the adapter, as modules_to_save; leave it out, and the head stays frozen"
        )
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
    """Refuse ways to draw A and B that are not ours, above all those that change the base."""
    how = init_kind(config)
    if how in (True, False, "gaussian"):
        return
    reason = "expected True, False or 'gaussian'"
    if how in START_VALUES:
        reason += "; a folder of an adapter that began with it can be loaded"
    elif how == "mica":
        reason = "with it PEFT never trains lora_B"
    elif isinstance(how, str) and how.startswith(_CHANGE_THE_BASE):
        reason = (
            "with it PEFT changes weights of the base, which adapters share here; PEFT's save_pretrained "
            "has path_initial_model_for_weight_conversion= to make a plain LoRA folder of most of these"
        )
    raise ValueError(
        f"adapter {name!r}: init_lora_weights={config.init_lora_weights!r} is not supported: {reason}"
    )


def _check_selection(name: str, config: LoraConfig) -> None:
    """Refuse what PEFT would fail at when it compares the names of modules."""
    for field in ("target_modules", "exclude_modules"):
        value = getattr(config, field)
        names = value if isinstance(value, list | tuple | set) else [] if value is None else [value]
        if not all(isinstance(item, str) for item in names):
            raise ValueError(f"adapter {name!r}: {field}: expected a pattern or names, got {value!r}")
        try:
            re.compile(value if isinstance(value, str) else "")
        except re.error as error:
            raise ValueError(f"adapter {name!r}: {field}: {value!r} is no pattern: {error}") from error
    value = config.layers_to_transform
    layers = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(type(item) is int for item in layers):
        raise ValueError(f"adapter {name!r}: layers_to_transform: expected indices, got {value!r}")


def init_kind(config: LoraConfig) -> Any:
    """`init_lora_weights`, whose words PEFT reads in any case."""
    how = config.init_lora_weights
    return how.lower() if isinstance(how, str) else how
