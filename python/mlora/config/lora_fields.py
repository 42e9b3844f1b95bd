"""Checks of an adapter's ``lora`` block, which holds fields of PEFT's ``LoraConfig``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlora.config.strict import KeyPathError, KeyPathErrors, UnknownKeyError, shown

if TYPE_CHECKING:
    from peft import LoraConfig


LARGEST = sys.float_info.max


# The fields of PEFT's LoraConfig, written down because importing PEFT takes seconds; a test compares them.
CHOICES = [
    "r",
    "target_modules",
    "exclude_modules",
    "lora_alpha",
    "lora_dropout",
    "fan_in_fan_out",
    "bias",
    "use_rslora",
    "modules_to_save",
    "init_lora_weights",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "task_type",
    "megatron_config",
    "trainable_token_indices",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "use_dora",
    "velora_config",
    "alora_invocation_tokens",
    "use_qalora",
    "monteclora_config",
    "layer_replication",
    "lora_bias",
    "target_parameters",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "ensure_weight_tying",
]
# PEFT's notes in an adapter's folder about its origin. A config may repeat them with these values only.
NOTES: dict[str, Any] = {
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "inference_mode": False,
    "megatron_core": "megatron.core",
    "peft_type": "LORA",
    "peft_version": None,
    "qalora_group_size": 16,
    "revision": None,
    "runtime_config": None,
}


def check_lora(values: dict[str, Any]) -> dict[str, Any]:
    """Checks a ``lora`` block without a model and returns it. KeyPathErrors holds all faults."""
    faults = []
    for key, value in values.items():
        try:
            _check_field(str(key), value)
        except KeyPathError as error:
            faults.append(error)
    if faults:
        raise KeyPathErrors(faults)
    return values


def _check_field(key: str, value: Any) -> None:
    if key in NOTES:
        if value != NOTES[key]:
            raise KeyPathError(key, "is no setting of a run; remove the key")
    elif key not in CHOICES:
        raise UnknownKeyError(key, CHOICES)
    elif key in CHECKS:
        CHECKS[key](key, value)


def _check_rank(key: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise KeyPathError(key, f"a rank must be a whole number of at least 1, got {shown(value)}")
    if value >= 2**31:
        raise KeyPathError(key, f"a rank must be below 2^31, got {value}")


def _check_alpha(key: str, value: Any) -> None:
    _check_number(key, value)
    if value == 0:
        raise KeyPathError(key, "must not be 0, which scales the adapter away: nothing would be trained")


def _check_dropout(key: str, value: Any) -> None:
    _check_number(key, value)
    if not 0 <= value < 1:
        raise KeyPathError(key, f"must be at least 0 and below 1, got {value}")


def _check_number(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise KeyPathError(key, f"must be a number, got {shown(value)}")


def _check_switch(key: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise KeyPathError(key, f"must be true or false, got {shown(value)}")


def _check_patterns(key: str, value: Any) -> None:
    if not isinstance(value or {}, dict):
        raise KeyPathError(key, f"must be a mapping from module name to number, got {shown(value)}")
    for module, number in (value or {}).items():
        _check_pattern(key, module)
        (_check_rank if key == "rank_pattern" else _check_alpha)(f"{key}.{module}", number)


def _check_modules(key: str, value: Any) -> None:
    names = value if isinstance(value, list) else [value]
    if value is not None and not all(isinstance(name, str) and name for name in names):
        raise KeyPathError(key, f"must be a name, a pattern or a list of names, got {shown(value)}")
    if value == []:
        raise KeyPathError(key, "must not be empty")
    if isinstance(value, str):
        words = re.split(r"[\s,]+", value.strip())
        if len(words) > 1 and all(re.fullmatch(r"[\w.]+", word) for word in words):
            raise KeyPathError(key, f"{shown(value)} is one pattern; did you mean [{', '.join(words)}]?")
        _check_pattern(key, value)


def _check_pattern(key: str, value: Any) -> None:
    try:
        re.compile(str(value))
    except re.error as error:
        raise KeyPathError(key, f"{value!r} is not a regular expression: {error}") from error


CHECKS: dict[str, Callable[[str, Any], None]] = {
    "r": _check_rank,
    "lora_alpha": _check_alpha,
    "lora_dropout": _check_dropout,
    "rank_pattern": _check_patterns,
    "alpha_pattern": _check_patterns,
    "use_rslora": _check_switch,
    "fan_in_fan_out": _check_switch,
    "use_dora": _check_switch,
    "target_modules": _check_modules,
    "exclude_modules": _check_modules,
}


def build_lora(values: dict[str, Any]) -> LoraConfig:
    """Returns PEFT's config for a ``lora`` block, by default for a causal language model.

    ValueError carries PEFT's reason if PEFT refuses the values.
    """
    from peft import LoraConfig

    try:
        return LoraConfig(**{"task_type": "CAUSAL_LM", **values})
    except (TypeError, ValueError, ImportError) as error:
        raise ValueError(str(error)) from error
