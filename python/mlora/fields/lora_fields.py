"""The checks of an adapter's ``lora`` block, which holds the fields of PEFT's ``LoraConfig``."""

from __future__ import annotations

import difflib
import re
import sys
from typing import TYPE_CHECKING, Any

from mlora.fields.strict import KeyPathError

if TYPE_CHECKING:
    from peft import LoraConfig


LARGEST = sys.float_info.max


def nearest(word: str, words: list[str], what: str = "known keys") -> str:
    """Return the end of an error line: the nearest of the known words, or all of them.

    Args:
        word: what came.
        words: what is known.
        what: what they are.

    Returns:
        ``did you mean 'r'?`` or ``known keys: ...``.
    """
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    if not close:  # "lr" is learning_rate
        close = [known for known in words if "".join(part[:1] for part in known.split("_")) == word][:1]
    if not close:
        close = [known for known in words if word.startswith(known) and len(word) <= len(known) + 2][:1]
    return f"did you mean {close[0]!r}?" if close else f"{what}: {', '.join(words)}"


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
# What PEFT notes in an adapter's folder about where it comes from, and the value that says nothing.
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
    """Check a ``lora`` block by itself, without a model.

    Args:
        values: fields of PEFT's ``LoraConfig``.

    Returns:
        The same values.

    Raises:
        KeyPathError: an unknown key (with the nearest name), a rank below 1, an alpha of 0, a dropout outside
            ``[0, 1)`` or a value of the wrong type.
    """
    for key, value in values.items():
        if key not in CHOICES and key not in NOTES:
            raise KeyPathError(str(key), f"unknown key; {nearest(str(key), CHOICES)}")
        if key in NOTES and value != NOTES[key]:
            raise KeyPathError(key, "says nothing that a run could follow; remove the key")
    _check_rank("r", values.get("r", 8))
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = values.get(key) or {}
        if not isinstance(pattern, dict):
            raise KeyPathError(key, f"must be a mapping from module name to number, got {pattern!r}")
        for module, value in pattern.items():
            _check_pattern(key, module)
            (_check_rank if key == "rank_pattern" else _check_alpha)(f"{key}.{module}", value)
    _check_alpha("lora_alpha", values.get("lora_alpha", 8))
    dropout = values.get("lora_dropout", 0.0)
    _check_number("lora_dropout", dropout)
    if not 0 <= dropout < 1:
        raise KeyPathError("lora_dropout", f"must be at least 0 and below 1, got {dropout}")
    for key in ("use_rslora", "fan_in_fan_out", "use_dora"):
        if not isinstance(values.get(key, False), bool):
            raise KeyPathError(key, f"must be true or false, got {values[key]!r}")
    for key in ("target_modules", "exclude_modules"):
        _check_modules(key, values.get(key))
    return values


def _check_rank(key: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise KeyPathError(key, f"a rank must be a whole number of at least 1, got {value!r}")
    if value >= 2**31:
        raise KeyPathError(key, f"a rank must be below 2^31, got {value}")


def _check_alpha(key: str, value: Any) -> None:
    _check_number(key, value)
    if value == 0:
        raise KeyPathError(key, "must not be 0, which scales the adapter away: nothing would be trained")


def _check_number(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise KeyPathError(key, f"must be a number, got {value!r}")


def _check_modules(key: str, value: Any) -> None:
    names = value if isinstance(value, list) else [value]
    if value is not None and not all(isinstance(name, str) and name for name in names):
        raise KeyPathError(key, f"must be a name, a pattern or a list of names, got {value!r}")
    if value == []:
        raise KeyPathError(key, "must not be empty")
    if isinstance(value, str):
        _check_pattern(key, value)


def _check_pattern(key: str, value: Any) -> None:
    try:
        re.compile(str(value))
    except re.error as error:
        raise KeyPathError(key, f"{value!r} is not a regular expression: {error}") from error


def build_lora(values: dict[str, Any]) -> LoraConfig:
    """Return PEFT's config of a ``lora`` block, for a causal language model unless it says otherwise.

    Args:
        values: fields of PEFT's ``LoraConfig``.

    Returns:
        A ``peft.LoraConfig``.

    Raises:
        ValueError: PEFT refuses the values.
    """
    from peft import LoraConfig

    try:
        return LoraConfig(**{"task_type": "CAUSAL_LM", **values})
    except (TypeError, ValueError, ImportError) as error:
        raise ValueError(str(error)) from error
