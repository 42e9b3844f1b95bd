"""Finds the layers that an adapter sits on, by PEFT's rules, with its rank, scaling and dropout in each."""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..adapters.kind import LayerSpec
from ..adapters.registry import kind_for
from ..adapters.trained_parts import TRAINED_PARTS, with_task_heads
from ..errors import AdapterError
from ..frozen.quantized.families import is_gptqmodel
from ..layers.adapter_layer import AdapterLayer
from ..layers.embedding import MultiLoRAEmbedding
from ..layers.linear import MultiLoRALinear
from ..layers.over_module import OverModule
from .parameters import check_parameters, in_order, is_weight, near_parameters, target_parameters
from .patterns import check_patterns
from .tied_weights import refuse_tied_targets
from .trained import trained_layers

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer that an adapter can be put on, converted or not."""
    return MultiLoRALinear.serves(module.base if isinstance(module, OverModule) else module)


def target_layers(model: nn.Module, name: str, config: LoraConfig) -> dict[str, LayerSpec]:
    """Returns the adapter's spec in each layer that PEFT would put it on, by name.

    First come layers with low-rank parts, then modules that it trains copies or rows of, both in the model's
    order. Raises ValueError if a name matches nothing, or a match cannot have such an adapter.
    """
    resolved, kind = _resolve(model, name, with_task_heads(config)), kind_for(name, config).name
    modules = dict(base_modules(model))
    parameters = target_parameters(resolved, modules.items())
    layers = {}
    for key, module in modules.items():
        targeted = matches(resolved, key)
        if targeted:
            _check_target(model, name, resolved, key, module)
            layers[key] = _layer_spec(resolved, key, kind)
        if key in parameters:
            _refuse_both(name, key, targeted)
            check_parameters(name, resolved, key, module, parameters[key])
            layers[key] = _parameters_spec(resolved, key, module, parameters[key], kind)
    if config.target_parameters and not parameters:
        wanted = sorted(config.target_parameters)
        hint = near_parameters(wanted, modules.items())
        raise AdapterError(name, f"target_parameters={wanted!r} match no parameter of this model{hint}")
    if not layers:
        raise AdapterError(name, f"{_no_match(model, config)}")
    refuse_tied_targets(model, name, resolved, modules, layers)
    trained = trained_layers(model, name, resolved, modules)
    for key in trained:
        if key in layers:
            raise AdapterError(
                name,
                f"{key} is in target_modules and is trained itself (modules_to_save or "
                "trainable_token_indices); remove it from one of them",
            )
    return layers | trained


def low_rank(layers: Mapping[str, LayerSpec]) -> dict[str, LayerSpec]:
    """Returns those of an adapter's layers that `target_modules` names."""
    return {key: one for key, one in layers.items() if one.kind not in TRAINED_PARTS}


def _refuse_both(name: str, key: str, targeted: bool) -> None:
    if targeted:
        raise AdapterError(name, f"{key} is in target_modules and its weight in target_parameters; keep one")


def _parameters_spec(
    config: LoraConfig, key: str, module: nn.Module, names: list[str], kind: str
) -> LayerSpec:
    """Returns the settings on a module's parameters; patterns see each parameter's full name, as in PEFT."""
    specs = {name: _layer_spec(config, f"{key}.{name}", kind) for name in in_order(module, names)}
    return specs["weight"] if is_weight(module, names) else LayerSpec.of_parameters(specs)


def _check_target(model: nn.Module, name: str, config: LoraConfig, key: str, module: nn.Module) -> None:
    """Raises ValueError for a matching module that cannot have an adapter."""
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    short = key.rpartition(".")[2]
    leave_out = f"remove it from target_modules, or pass exclude_modules=[{short!r}]"
    if type(module) is NonDynamicallyQuantizableLinear:
        raise AdapterError(
            name,
            f"target {key} is not supported: nn.MultiheadAttention reads its weight "
            f"without calling the layer; {leave_out}",
        )
    if not is_linear(module) and not MultiLoRAEmbedding.serves(module):
        raise AdapterError(
            name,
            f"target {key} is a {type(module).__name__}; only nn.Linear, Conv1D and "
            f"nn.Embedding are supported, and subclasses that keep nn.Linear's forward; {leave_out}",
        )
    try:
        _check_lora_target_modules_mamba(config, model, short)
    except ValueError as error:
        raise AdapterError(
            name,
            f"target {key} is not supported: Mamba's kernels read its weight without "
            f"calling the layer; {leave_out}",
        ) from error


def _no_match(model: nn.Module, config: LoraConfig) -> str:
    """Returns the message for targets that match no layer, with a hint at names that are similar."""
    known, wanted = linear_names(model), config.target_modules
    if isinstance(wanted, set):
        wanted = sorted(wanted)
    names = [wanted] if isinstance(wanted, str) else wanted or []
    near = [close for name in names for close in difflib.get_close_matches(name, known, n=1)]
    keys = ("exclude_modules", "layers_to_transform", "modules_to_save")
    others = [key for key in keys if getattr(config, key) is not None]
    beside = f" (with {', '.join(others)})" if others else ""
    wrong = [name for name in dict.fromkeys(near) if name not in names]
    hint = f"did you mean {', '.join(map(repr, wrong))}? " if wrong else ""
    if others and near and not wrong:
        left_out = " and ".join(f"{key}={getattr(config, key)}" for key in others)
        hint = f"without {left_out} they would; "
    spelt = isinstance(wanted, str) and wanted.lower() == "all-linear"
    if not spelt and difflib.get_close_matches(
        "all-linear", [name.lower() for name in names], n=1, cutoff=0.85
    ):
        alone = "" if isinstance(wanted, str) else ", not in a list"
        hint = f"did you mean 'all-linear'{alone}? "
    if isinstance(wanted, str) and wanted in known:
        hint = f"a string is a pattern for whole names; did you mean [{wanted!r}]? "
    return (
        f"target_modules={wanted!r}{beside} match nothing; {hint}"
        f"linear layers of this model: {', '.join(known) or 'none'}"
    )


def matches(config: LoraConfig, key: str) -> bool:
    """Whether PEFT would put an adapter with this config on the module named `key`."""
    from peft.tuners.tuners_utils import check_target_module_exists

    return bool(check_target_module_exists(config, key))


def _resolve(model: nn.Module, name: str, config: LoraConfig) -> LoraConfig:
    """Returns a copy with PEFT's expansion of `all-linear` and of the model type's default targets."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULT_TARGETS

    config = translated(model, name, config)
    if _is_all_linear(config):
        config.target_modules = sorted(_all_linear(model, config))
    if config.target_modules is None:
        kind = getattr(getattr(model, "config", None), "model_type", None)
        if kind not in DEFAULT_TARGETS and config.target_parameters:
            config.target_modules = []
            return config
        if kind not in DEFAULT_TARGETS:
            raise AdapterError(
                name,
                f"target_modules: expected names, a regular expression or 'all-linear': "
                f"PEFT has no default for model type {kind!r}",
            )
        config.target_modules = sorted(DEFAULT_TARGETS[kind])
    return config


def translated(model: nn.Module, name: str, config: LoraConfig) -> LoraConfig:
    """Returns a copy with PEFT's translation of layers that Transformers 5 has fused into parameters."""
    from peft.utils.transformers_weight_conversion import (
        convert_peft_config_for_transformers,
        get_model_conversion_mapping,
    )

    check_patterns(base_modules(model), name, config)
    translated, base = copy.deepcopy(config), cast("PreTrainedModel", model)
    if not hasattr(getattr(model, "config", None), "model_type"):
        return translated
    try:
        convert_peft_config_for_transformers(translated, base, get_model_conversion_mapping(base))
        if _is_all_linear(config) and not _is_all_linear(translated):
            # PEFT names the layers here; it does not know those that are converted
            hidden = copy.deepcopy(config)
            hidden.target_modules = [key.rpartition(".")[2] for key in _converted_linear(model)]
            convert_peft_config_for_transformers(hidden, base, get_model_conversion_mapping(base))
            both = [*(translated.target_modules or ()), *(hidden.target_modules or ())]
            translated.target_modules = sorted(set(both))
    except ValueError as error:
        raise AdapterError(name, f"target_modules: {str(error).rstrip('.')}") from error
    return translated


def _is_all_linear(config: LoraConfig) -> bool:
    return isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear"


def _all_linear(model: nn.Module, config: LoraConfig) -> set[str]:
    """Expands `all-linear` as PEFT does; also works on a model with converted layers.

    It includes layers of gptqmodel, which PEFT leaves out: it then finds no layer, and refuses.
    """
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers

    expanded: Any = _maybe_include_all_linear_layers(copy.deepcopy(config), model)
    modules = dict(base_modules(model))
    return {key for key in expanded.target_modules if key in modules} | _converted_linear(model)


def _converted_linear(model: nn.Module) -> set[str]:
    """Returns the names of converted linear layers, and of gptqmodel's, except the output head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        key
        for key, module in base_modules(model)
        if (isinstance(module, AdapterLayer) or is_gptqmodel(module))
        and is_linear(module)
        and module is not head
    }


def _layer_spec(config: LoraConfig, key: str, kind: str) -> LayerSpec:
    from peft.utils.other import get_pattern_key

    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    rank = ranks.get(get_pattern_key(list(ranks), key), config.r)
    alpha = alphas.get(get_pattern_key(list(alphas), key), config.lora_alpha)
    scaling = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
    return LayerSpec(rank, scaling, config.lora_dropout, kind)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns all linear layers by name, converted or not; their positions are the layers' indices."""
    return {key: module for key, module in base_modules(model) if is_linear(module)}


def base_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields all modules by name, except the model itself and what converted layers hold of adapters."""
    inside: tuple[str, ...] = ()
    for key, module in model.named_modules():
        if not key or key.startswith(inside or "."):
            continue
        yield key, module
        if isinstance(module, AdapterLayer):
            own = set(getattr(module, "base", nn.Module())._modules)
            inside = tuple(f"{key}.{part}" for part in module._modules if part not in own)


def linear_names(model: nn.Module) -> list[str]:
    """Returns the last parts of the linear layers' names, each once."""
    return list(dict.fromkeys(key.rpartition(".")[2] for key in linear_layers(model)))


def portable_targets(model: nn.Module, config: LoraConfig, layers: list[str]) -> dict[str, Any]:
    """Returns fields of a LoraConfig by which PEFT finds exactly these layers in the base model.

    Uses the last parts of the layers' names if they suffice, as people write them, else full names. Targets
    on parameters are those that PEFT translates the config's to.
    """
    resolved = _resolve(model, "", config)
    if not resolved.target_parameters:
        return _portable_modules(model, config, layers)
    modules = [key for key in layers if matches(resolved, key)]
    fields = _portable_modules(model, resolved, modules) if modules else {"target_modules": []}
    names = ("rank_pattern", "alpha_pattern")
    parameters = {"target_parameters": sorted(resolved.target_parameters)}
    return fields | parameters | {name: getattr(resolved, name) for name in names}


def _portable_modules(model: nn.Module, config: LoraConfig, layers: list[str]) -> dict[str, Any]:
    wanted = set(layers)
    keys = [key for key, _ in base_modules(model)]
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
