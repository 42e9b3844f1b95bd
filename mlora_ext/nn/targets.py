"""Reading PEFT's LoraConfig: what is supported, and each target layer's rank, scaling and dropout."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import math
import re
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..dropout import check_probability
from .linear import MultiLoRALinear
from .routes import LayerSpec

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

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
# Multiplies by the transposed weight with `@`: nn.Linear's result.
_FALCON = "transformers.models.falcon.modeling_falcon.FalconLinear"
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
            "model's head beside the adapter, as modules_to_save"
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


def is_linear(module: nn.Module) -> bool:
    """Whether a module is one that an adapter can be put on."""
    from transformers.pytorch_utils import Conv1D

    kinds = (nn.Linear, Conv1D)
    return isinstance(module, MultiLoRALinear) or type(module) in kinds or _computes_as_linear(module)


def _computes_as_linear(module: nn.Module) -> bool:
    """Whether a subclass of nn.Linear computes `x W^T + b` and holds nothing but a plain weight and bias."""
    kind = type(module)
    if not isinstance(module, nn.Linear) or kind is NonDynamicallyQuantizableLinear:
        return False
    own = kind.forward is not nn.Linear.forward and f"{kind.__module__}.{kind.__qualname__}" != _FALCON
    state = {**module._parameters, **module._buffers, **module._modules}
    return not own and state.keys() == {"weight", "bias"} and type(state["weight"]) is nn.Parameter


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer stores its weight as `[d_in, d_out]`."""
    return bool(getattr(module, "fan_in_fan_out", not isinstance(module, nn.Linear)))


def features(module: nn.Module) -> tuple[int, int]:
    """d_in and d_out of a linear layer, converted or not."""
    weight: Any = module.weight
    rows, columns = weight.shape
    return (rows, columns) if is_transposed(module) else (columns, rows)


def target_layers(model: nn.Module, name: str, config: LoraConfig) -> dict[str, LayerSpec]:
    """The layers that PEFT would put this adapter on, in the model's order.

    Args:
        model: the base model, converted or not.
        name: of the adapter, for messages.
        config: PEFT's config; not changed.

    Returns:
        Rank, scaling and dropout by layer name.

    Raises:
        ValueError: if nothing matches, or a match is not a linear layer.
    """
    resolved = _resolve(model, name, config)
    layers = {}
    for key, module in model.named_modules():
        if not key or _inside_layer(model, key) or not matches(resolved, key):
            continue
        _check_target(model, name, resolved, key, module)
        layers[key] = _layer_spec(resolved, key)
    if not layers:
        raise ValueError(f"adapter {name!r}: {_no_match(model, config)}")
    return layers


def _check_target(model: nn.Module, name: str, config: LoraConfig, key: str, module: nn.Module) -> None:
    """Refuse a matching module that cannot have an adapter."""
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    short = key.rpartition(".")[2]
    leave_out = f"take it out of target_modules, or pass exclude_modules=[{short!r}]"
    if type(module) is NonDynamicallyQuantizableLinear:
        raise ValueError(
            f"adapter {name!r}: target {key} is not supported: nn.MultiheadAttention reads its weight and "
            f"never calls it; {leave_out}"
        )
    if not is_linear(module):
        raise ValueError(
            f"adapter {name!r}: target {key} is a {type(module).__name__}; only nn.Linear and Conv1D are "
            f"supported, and subclasses that keep nn.Linear's forward; {leave_out}"
        )
    try:
        _check_lora_target_modules_mamba(config, model, short)
    except ValueError as error:
        raise ValueError(
            f"adapter {name!r}: target {key} is not supported: Mamba's kernels read its weight and never "
            f"call it; {leave_out}"
        ) from error


def _no_match(model: nn.Module, config: LoraConfig) -> str:
    """What to say where no layer matches; of names in a list, what they may have meant."""
    known, wanted = _linear_names(model), config.target_modules
    if isinstance(wanted, set):
        wanted = sorted(wanted)
    names = [wanted] if isinstance(wanted, str) else wanted or []
    near = [close for name in names for close in difflib.get_close_matches(name, known, n=1)]
    others = [key for key in ("exclude_modules", "layers_to_transform") if getattr(config, key) is not None]
    beside = f" (with {', '.join(others)})" if others else ""
    hint = f"did you mean {', '.join(map(repr, dict.fromkeys(near)))}? " if near else ""
    if isinstance(wanted, str) and wanted in known:
        hint = f"a string is a pattern for whole names; did you mean [{wanted!r}]? "
    return (
        f"target_modules={wanted!r}{beside} match nothing; {hint}"
        f"linear layers of this model: {', '.join(known) or 'none'}"
    )


def matches(config: LoraConfig, key: str) -> bool:
    """Whether PEFT would put an adapter with this config on the module of that name."""
    from peft.tuners.tuners_utils import check_target_module_exists

    return bool(check_target_module_exists(config, key))


def _resolve(model: nn.Module, name: str, config: LoraConfig) -> LoraConfig:
    """A copy with PEFT's own expansion of `all-linear` and of a model type's default targets."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULT_TARGETS

    config = _translated(model, name, config)
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        config.target_modules = sorted(_all_linear(model, config))
    if config.target_modules is None:
        kind = getattr(getattr(model, "config", None), "model_type", None)
        if kind not in DEFAULT_TARGETS:
            raise ValueError(
                f"adapter {name!r}: target_modules: expected names, a regular expression or 'all-linear'; "
                f"PEFT knows no "
                f"default for model type {kind!r}"
            )
        config.target_modules = sorted(DEFAULT_TARGETS[kind])
    return config


def _translated(model: nn.Module, name: str, config: LoraConfig) -> LoraConfig:
    """A copy with PEFT's own translation of names of layers that Transformers 5 has fused into parameters."""
    from peft.utils.transformers_weight_conversion import (
        convert_peft_config_for_transformers,
        get_model_conversion_mapping,
    )

    translated, base = copy.deepcopy(config), cast("PreTrainedModel", model)
    if not hasattr(getattr(model, "config", None), "model_type"):
        return translated
    try:
        convert_peft_config_for_transformers(translated, base, get_model_conversion_mapping(base))
    except ValueError as error:
        raise ValueError(
            f"adapter {name!r}: target_modules: {str(error).rstrip('.')}; adapters on experts are not "
            f"supported. {_outside_experts(model, translated)}"
        ) from error
    if translated.target_parameters:
        raise ValueError(
            f"adapter {name!r}: target_modules={config.target_modules!r}: PEFT puts it on parameters of the "
            f"model's experts ({', '.join(sorted(translated.target_parameters))}), which are no layers and "
            f"not supported. {_outside_experts(model, translated)}"
        )
    return translated


def _outside_experts(model: nn.Module, config: LoraConfig) -> str:
    """What to name instead: those of the wanted layers that PEFT leaves as layers, or else all of them."""
    from peft.utils.transformers_weight_conversion import (
        convert_peft_config_for_transformers,
        get_model_conversion_mapping,
    )

    head, base = getattr(model, "get_output_embeddings", lambda: None)(), cast("PreTrainedModel", model)
    linear = {key.rpartition(".")[2] for key, one in linear_layers(model).items() if one is not head}
    works = []
    for short in sorted(linear, key=_linear_names(model).index):
        alone = copy.deepcopy(config)
        alone.target_modules, alone.target_parameters = [short], None
        with contextlib.suppress(ValueError):  # PEFT: names of a fused layer must be given together
            convert_peft_config_for_transformers(alone, base, get_model_conversion_mapping(base))
            works += [] if alone.target_parameters else [short]
    wanted = [short for short in works if short in (config.target_modules or ())]
    if not works:
        return "This model has no linear layers outside of its experts"
    return f"Name layers outside of the experts: target_modules={wanted or works}"


def _all_linear(model: nn.Module, config: LoraConfig) -> set[str]:
    """PEFT's expansion, which also works on a model whose layers have been converted already."""
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers

    expanded: Any = _maybe_include_all_linear_layers(copy.deepcopy(config), model)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return set(expanded.target_modules) | {
        key
        for key, module in model.named_modules()
        if isinstance(module, MultiLoRALinear) and module is not head
    }


def _layer_spec(config: LoraConfig, key: str) -> LayerSpec:
    from peft.utils.other import get_pattern_key

    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    rank = ranks.get(get_pattern_key(list(ranks), key), config.r)
    alpha = alphas.get(get_pattern_key(list(alphas), key), config.lora_alpha)
    scaling = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
    return LayerSpec(rank, scaling, config.lora_dropout)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """All linear layers of a model, converted or not, by name: their positions are the layers' indices."""
    return {key: module for key, module in model.named_modules() if is_linear(module)}


def _inside_layer(model: nn.Module, key: str) -> bool:
    """Whether the module is a part of a converted layer: a bank, or an adapter's slot in it."""
    return ".lora_A" in key or ".lora_B" in key


def _linear_names(model: nn.Module) -> list[str]:
    """Last parts of the names of the model's linear layers, each once."""
    return list(dict.fromkeys(key.rpartition(".")[2] for key in linear_layers(model)))


def portable_targets(model: nn.Module, config: LoraConfig, layers: list[str]) -> dict[str, Any]:
    """Fields of a LoraConfig by which PEFT finds exactly these layers in the base model.

    Last parts of names where they suffice, as people write them; otherwise full names.
    """
    wanted = set(layers)
    keys = [key for key, _ in model.named_modules() if key and not _inside_layer(model, key)]
    short = sorted({key.rpartition(".")[2] for key in layers})
    trial = copy.deepcopy(config)
    trial.target_modules = short
    if {key for key in keys if matches(trial, key)} == wanted:
        return {"target_modules": short}
    return {
        "target_modules": sorted(layers),
        "exclude_modules": None,
        "layers_to_transform": None,
        "layers_pattern": None,
    }


def adapter_dtype(weight: torch.Tensor, autocast_adapter_dtype: bool) -> torch.dtype:
    """PEFT's rule: adapters of a half-precision base are kept in fp32, others in the base's dtype."""
    half = weight.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if half and autocast_adapter_dtype else weight.dtype
