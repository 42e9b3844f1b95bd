"""Makes a plain model with one adapter merged into its weights: merge_and_unload."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..adapters.kind import LayerSpec, one_by_one
from ..adapters.registry import adapter_kind
from ..adapters.trained_parts import TRAINED_COPY, TRAINED_ROWS
from ..errors import AdapterError
from ..frozen.plain import PlainWeight
from ..layers.adapter_layer import AdapterLayer
from ..layers.adapter_weights import adapter_layers, one_adapter
from ..layers.batch_statistics import StaysInEvaluation
from ..layers.embedding import MultiLoRAEmbedding
from ..layers.linear import MultiLoRALinear
from ..layers.over_module import OverModule, RowSource
from ..layers.parameter_layer import ParameterLayer
from ..targets.find import low_rank
from .peft_folder import adapter_config
from .peft_layers import parameter_of


def merge_and_unload(
    model: nn.Module, adapter_name: str | None = None, *, safe_merge: bool = False
) -> nn.Module:
    """Returns a copy of the base model with one adapter merged into its weights.

    `W' = W + scaling B A`, or what DoRA makes of it, computed and rounded by PEFT's own `merge_and_unload`. A
    `lora_bias` goes into the layer's bias. The converted model keeps its adapters and its weights. The copy
    has plain layers and its class's forward; it loses what a Trainer has put on the instance. The base's
    dropouts are 0 in the copy, too.

    Args:
        model: converted by `convert_model`.
        adapter_name: of the adapter. Default: the one that `set_adapter` named, or the only one.
        safe_merge: raise if a merged weight is NaN or infinite, as PEFT does.

    Raises:
        ValueError: if there is no such adapter, if there are several and none is named, if its kind cannot be
            merged, or if it has a `lora_bias` on a layer without bias. Also if a layer's frozen weight is of
            a kind without the original weight, such as 8-bit integers, or one of the adapter's layers has a
            weight that is tied to another layer's, which would change, too. With `safe_merge` also if a
            merged weight is not finite.

    Example:
        >>> merge_and_unload(model, "a").save_pretrained("merged")
    """
    from peft import LoraModel

    name = one_adapter(model, adapter_name)
    every = adapter_layers(model, name)
    layers = _mergeable(name, every)
    _refuse_other_weights(model, name)
    _refuse_tied(model, name, every)
    config = adapter_config(model, name)
    config.init_lora_weights = True
    linear = [layer for layer in layers.values() if isinstance(layer, MultiLoRALinear)]
    config.fan_in_fan_out = bool(linear) and all(layer.fan_in_fan_out for layer in linear)
    config.modules_to_save = config.trainable_token_indices = None
    config.ensure_weight_tying = False
    there = "default"  # PEFT refuses names such as "train"
    tuner: Any = LoraModel(_plain_copy(model), config, there, low_cpu_mem_usage=True)
    scalings = one_by_one({key: layer.specs[name] for key, layer in layers.items()})
    for key, layer in layers.items():
        own = {part: parameter.detach().clone() for part, parameter in layer.parameters_of(name).items()}
        keys = layer.peft_keys(layer, layer.specs[name])
        for part, values in layer.exported(name, own).items():
            attribute = "bias" if keys[part].endswith(".bias") else "weight"
            path, _, bank = f"{key}.{keys[part].removesuffix(f'.{attribute}')}".rpartition(".")
            theirs = tuner.model.get_submodule(path)
            parameter = parameter_of(theirs)
            theirs.scaling[there] = scalings[key if parameter is None else f"{key}.{parameter}"].scaling
            trained = nn.Parameter(values, requires_grad=False)
            if isinstance(layer, MultiLoRAEmbedding):
                getattr(theirs, bank)[there] = trained
            else:
                setattr(getattr(theirs, bank)[there], attribute, trained)
    merged: nn.Module = tuner.merge_and_unload(safe_merge=safe_merge)
    for key, layer in sorted(every.items(), key=lambda item: bool(item[1].specs[name].tied_to)):
        if isinstance(layer, OverModule):  # tied ones last: they share what is merged already
            _replace_trained(merged, key, layer, name, safe_merge)
    return merged


def _replace_trained(merged: nn.Module, key: str, layer: OverModule, name: str, safe: bool) -> None:
    """Puts what an adapter has trained itself into a merged model."""
    spec, own = layer.specs[name], layer.parameters_of(name)
    if spec.kind not in (TRAINED_COPY, TRAINED_ROWS):
        return
    if safe and not all(parameter.isfinite().all() for parameter in own.values()):
        raise AdapterError(name, f"layer {key}: a trained weight is NaN or infinite")
    if spec.kind == TRAINED_COPY:
        trained = _merged_copy(merged, layer, name).requires_grad_(False).to(layer.frozen.dtype)
        parent, _, child = key.rpartition(".")
        setattr(merged.get_submodule(parent), child, trained.train(merged.training))
        return
    assert isinstance(layer, RowSource)
    weight: Any = merged.get_submodule(key).weight
    with torch.no_grad():
        weight[list(spec.tokens)] = layer.trained_rows(name).to(weight.dtype)


def _merged_copy(merged: nn.Module, layer: OverModule, name: str) -> nn.Module:
    """Returns a copy of an adapter's module; one that is tied shares the weight of what is merged already."""
    tied = layer.specs[name].tied_to
    if not tied:
        return copy.deepcopy(layer.modules_to_save.of(name))
    weight: Any = merged.get_submodule(tied).weight
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = weight
    return head


def _mergeable(name: str, layers: Mapping[str, AdapterLayer]) -> dict[str, AdapterLayer]:
    """Returns an adapter's layers with low-rank parts; raises ValueError if one of them cannot be merged."""
    found: dict[str, AdapterLayer] = {}
    for key in low_rank({key: layer.specs[name] for key, layer in layers.items()}):
        layer = layers[key]
        kind = adapter_kind(layer.specs[name].kind)
        served = isinstance(layer, MultiLoRALinear | MultiLoRAEmbedding | ParameterLayer)
        if not (served and (kind.is_plain or kind.merges)):
            raise AdapterError(
                name,
                f"layer {key}: only plain LoRA, lora_bias and DoRA can be merged, and this "
                f"adapter is of kind {kind.name!r}; save it and merge it with PEFT",
            )
        if isinstance(layer, MultiLoRALinear) and layer.bias is None and "lora_bias" in kind.parameter_names:
            raise AdapterError(
                name,
                f"layer {key} has no bias that could take its lora_bias; use the adapter without merging it",
            )
        found[key] = layer
    return found


def _refuse_other_weights(model: nn.Module, name: str) -> None:
    for key, layer in model.named_modules():
        if isinstance(layer, MultiLoRALinear) and not isinstance(layer.frozen, PlainWeight):
            raise AdapterError(
                name,
                f"layer {key}: cannot be merged into a frozen weight of kind "
                f"{type(layer.frozen).__name__}; save the adapter and merge it into the original base model",
            )


def _refuse_tied(model: nn.Module, name: str, layers: Mapping[str, AdapterLayer]) -> None:
    owners: dict[int, list[str]] = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(key)
    for key, layer in layers.items():
        spec = layer.specs[name]
        if spec.kind == TRAINED_COPY:
            continue  # it gets a weight of its own
        alike = _tied_alike(name, spec, key, layers)
        changed = ["weight"] if spec.kind == TRAINED_ROWS else list(layer._parameters)
        own = {id(layer._parameters[part]) for part in changed if layer._parameters[part] is not None}
        tied = [other for one in own for other in owners[one]]
        others = [other for other in tied if other.rpartition(".")[0] not in alike]
        if others:
            raise ValueError(
                f"layer {key}: its weight is tied to {', '.join(others)}, and merging would change both; "
                "untie the weights before you convert the model"
            )


def _tied_alike(name: str, spec: LayerSpec, key: str, layers: Mapping[str, AdapterLayer]) -> set[str]:
    """Returns the layers that train the same rows as this one, and this one."""
    source = spec.tied_to or key
    return {key, source} | {other for other, one in layers.items() if one.specs[name].tied_to == source}


def _plain_copy(model: nn.Module) -> nn.Module:
    """Returns a copy of the base model as it was before conversion, with its own weights."""
    copied = copy.deepcopy(model)
    for attribute in ("forward", "_original_forward", "peft_config", "_hf_peft_config_loaded"):
        copied.__dict__.pop(attribute, None)
    for key, module in list(copied.named_modules()):
        if isinstance(module, AdapterLayer):
            parent, _, child = key.rpartition(".")
            setattr(copied.get_submodule(parent), child, module.plain())
    for module in copied.modules():
        stayed = isinstance(vars(module).get("train"), StaysInEvaluation)
        hooks = [own for key, own in vars(module).items() if key.endswith("_hooks") and isinstance(own, dict)]
        for attributes in (vars(module), *hooks):
            for key in [key for key, value in attributes.items() if _is_ours(value)]:
                del attributes[key]
        if stayed:
            module.train(copied.training)
    return copied


def _is_ours(value: object) -> bool:
    """Whether conversion made this attribute or hook: its class or function is one of this package."""
    wrapped = getattr(value, "hook", value)  # as torch stores hooks of `load_state_dict`
    return str(getattr(wrapped, "__module__", "")).startswith("mlora_ext.")
