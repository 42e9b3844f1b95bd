"""Checks adapter names and PEFT's `LoraConfig`, field by field."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any

from ..errors import AdapterError
from ..ops.dropout import check_probability
from .trained_parts import check_trained_parts

if TYPE_CHECKING:
    from peft import LoraConfig

_HONOURED = {
    "r",
    "target_modules",
    "target_parameters",
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
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "loftq_config",
    "modules_to_save",
    "trainable_token_indices",
    "ensure_weight_tying",
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
NEEDS_DATA = {"eva": "eva_config", "corda": "corda_config", "lora_ga": "lora_ga_config"}
"""Values of `init_lora_weights` that look at the adapter's data, each with the field of its settings."""
_CHANGE_THE_BASE = re.compile(r"pissa(_niter_\d+)?|olora|corda|lora_ga")


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


def check_config(name: str, config: LoraConfig, honoured: str = "") -> None:
    """Refuses every unsupported setting (ValueError with field and value); no field is ignored.

    Args:
        name: the adapter's name, for messages.
        config: the adapter's config.
        honoured: a field that the adapter's kind supports beside those of plain LoRA.
    """
    from peft import LoraConfig

    _check_start(name, config)
    custom = getattr(config, "_custom_modules", None)
    if custom:
        raise AdapterError(
            name,
            f"_register_custom_module ({', '.join(k.__name__ for k in custom.values())}) "
            "is not supported; use a config without custom modules",
        )
    default = LoraConfig()
    for item in dataclasses.fields(config):
        if item.name in _HONOURED | _NEUTRAL | {honoured}:
            continue
        value = getattr(config, item.name)
        usual = getattr(default, item.name, None)
        # PEFT itself writes None, {}, [] or False for "not given".
        if value != usual and (value or usual):
            hint = "; lora_bias=True trains a bias with each adapter" if item.name == "bias" else ""
            raise AdapterError(name, f"{item.name}={value!r} is not supported{hint}")
    check_trained_parts(name, config)
    try:
        check_values(config)
    except ValueError as error:
        raise AdapterError(name, str(error)) from error
    for rank in (config.r, *(config.rank_pattern or {}).values()):
        if rank % 2 and init_kind(config) == "orthogonal":
            raise AdapterError(name, f"init_lora_weights='orthogonal' needs even ranks, got {rank}")


def _check_start(name: str, config: LoraConfig) -> None:
    """Refuses unsupported `init_lora_weights`, and settings of an initialisation that do not fit."""
    how = init_kind(config)
    if how in (True, False, "gaussian", *START_VALUES) or changes_base(config) or needs_weights(config):
        _check_settings(name, how, config)
        return
    reason = (
        "expected True, False, 'gaussian', 'orthogonal', 'eva', 'pissa', 'pissa_niter_<number>', 'olora', "
        "'corda', 'lora_ga' or 'loftq'"
    )
    if how == "mica":
        reason = "with it PEFT never trains lora_B"
    raise AdapterError(name, f"init_lora_weights={config.init_lora_weights!r} is not supported: {reason}")


def _check_settings(name: str, how: Any, config: LoraConfig) -> None:
    """Refuses an initialisation's own settings that are missing, not supported or another one's."""
    for kind, field in NEEDS_DATA.items():
        value = getattr(config, field, None)
        if value is not None and kind != how:
            raise AdapterError(
                name,
                f"{field}={value!r} is not supported with init_lora_weights={how!r}; it belongs to {kind!r}",
            )
    if how == "lora_ga" and config.lora_ga_config is None:
        raise AdapterError(name, "init_lora_weights='lora_ga' needs lora_ga_config=LoraGAConfig()")
    if how == "corda":
        _check_corda(name, config)
    if how == "loftq":
        _check_loftq(name, config)
    if changes_base(config) and config.use_dora:
        raise AdapterError(
            name,
            f"use_dora is not supported with init_lora_weights={how!r}: the norms of DoRA "
            "would be those of the shared base; use 'eva', 'orthogonal' or plain LoRA's values with it",
        )


def _check_corda(name: str, config: LoraConfig) -> None:
    own = config.corda_config
    if own is None:
        return
    for field in ("cache_file", "covariance_file", "use_float16_for_covariance"):
        if getattr(own, field):
            raise AdapterError(
                name,
                f"corda_config.{field}={getattr(own, field)!r} is not supported: "
                "covariances are computed from data, in fp32; leave it out",
            )
    if own.corda_method not in ("ipm", "kpm"):
        raise AdapterError(
            name, f"corda_config.corda_method: expected 'ipm' or 'kpm', got {own.corda_method!r}"
        )


def _check_loftq(name: str, config: LoraConfig) -> None:
    given: Any = config.loftq_config or {}
    usual = {"loftq_bits": 4, "loftq_iter": 1}
    if any(usual.get(key) != value for key, value in given.items()):
        raise AdapterError(
            name,
            f"loftq_config={given!r} is not supported: the base's weights are quantised "
            "already, once, in bits of their own; use LoftQConfig()",
        )
    if not all((config.lora_alpha, *(config.alpha_pattern or {}).values())):
        raise AdapterError(name, "lora_alpha: init_lora_weights='loftq' needs another than 0")
    if config.use_dora:
        raise AdapterError(
            name,
            "use_dora is not supported with init_lora_weights='loftq': the norms of DoRA "
            "would be those of the quantised base; use plain LoRA with it",
        )


def changes_base(config: LoraConfig) -> bool:
    """Whether PEFT changes base weights for this `init_lora_weights` such that an adapter can hold it."""
    how = init_kind(config)
    return isinstance(how, str) and _CHANGE_THE_BASE.fullmatch(how) is not None


def kind_setting(config: LoraConfig) -> str:
    """Returns the setting by which a config is not plain LoRA, as it is written; empty if PEFT has none."""
    if changes_base(config):
        return f"init_lora_weights={config.init_lora_weights!r}"
    return next((f"{key}=True" for key in ("use_dora", "lora_bias") if getattr(config, key, False)), "")


def needs_data(config: LoraConfig) -> bool:
    """Whether the initial values depend on the adapter's data."""
    return init_kind(config) in NEEDS_DATA


def needs_weights(config: LoraConfig) -> bool:
    """Whether the initial values depend on the weights that the base had before it was quantised."""
    return init_kind(config) == "loftq"


def equally_large(config: LoraConfig) -> LoraConfig:
    """Returns the config of an adapter as large whose initial values need no data and no original weights.

    EVA may give a layer up to `rho` times its rank; that counts.
    """
    if needs_weights(config):
        config = copy.deepcopy(config)
        config.init_lora_weights, config.loftq_config = True, {}
    if not needs_data(config):
        return config
    config, eva = copy.deepcopy(config), init_kind(config) == "eva"
    if eva:
        more = config.eva_config.rho  # type: ignore[union-attr]
        config.r = round(config.r * more)
        config.rank_pattern = {key: round(r * more) for key, r in (config.rank_pattern or {}).items()}
    config.init_lora_weights = True if eva else "olora"
    for field in NEEDS_DATA.values():
        setattr(config, field, None)
    return config


def check_values(config: LoraConfig) -> None:
    """Refuses ranks, alphas and selections of layers on which PEFT would fail."""
    for field in ("rank_pattern", "alpha_pattern"):
        if not isinstance(getattr(config, field) or {}, dict):
            raise ValueError(f"{field}: expected a dict, got {getattr(config, field)!r}")
    for rank in (config.r, *(config.rank_pattern or {}).values()):
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"r: expected an integer >= 1, got {rank!r}")
    for alpha in (config.lora_alpha, *(config.alpha_pattern or {}).values()):
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise ValueError(f"lora_alpha: expected a finite number, got {alpha!r}")
    check_probability("lora_dropout", config.lora_dropout)
    for field in ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern"):
        value = getattr(config, field)
        names = value if isinstance(value, list | tuple | set) else [] if value is None else [value]
        if not all(isinstance(item, str) for item in names):
            raise ValueError(f"{field}: expected a pattern or names, got {value!r}")
        try:
            re.compile(value if isinstance(value, str) else "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{field}: {value!r} is not a pattern: {error}") from error
    names = config.target_parameters or []
    if isinstance(names, str) or not all(isinstance(item, str) and item for item in names):
        raise ValueError(f"target_parameters: expected a list of names, got {names!r}")
    value = config.layers_to_transform
    layers = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(type(item) is int for item in layers):
        raise ValueError(f"layers_to_transform: expected indices, got {value!r}")


def init_kind(config: LoraConfig) -> Any:
    """Returns `init_lora_weights` in lower case, since PEFT ignores case there."""
    how = config.init_lora_weights
    return how.lower() if isinstance(how, str) else how
