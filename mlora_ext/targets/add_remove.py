"""Adds adapters to a converted model and removes them: add_adapter, remove_adapter."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..adapters.kind import LayerSpec
from ..adapters.lora_config import check_name, kind_setting, needs_data, needs_weights
from ..adapters.registry import kind_for
from ..adapters.trained_parts import TRAINED_COPY
from ..errors import AdapterError
from ..frozen.quantized.families import is_awq, is_quantized
from ..layers.adapter_layer import AdapterLayer, LayerPlace
from ..layers.adapter_weights import adapter_layers
from ..layers.batch_statistics import asked_mode
from ..layers.copies import TrainedCopies
from ..layers.fused_projections import FusedProjections
from ..layers.layer_kinds import layer_kind
from ..layers.linear import MultiLoRALinear
from ..layers.over_module import RowSource, plain_module
from ..ops.functional import scaling_dtype
from ..routing.adapter_info import AdapterInfo
from ..routing.route import LayerGroup
from ..routing.router import router_of
from .entries import warn_of_entries
from .find import linear_layers, target_layers
from .refuse import MOVED, check_layer, check_module, refuse_conflicts

if TYPE_CHECKING:
    from peft import LoraConfig

NO_QUANTIZED_LAYER = (
    "init_lora_weights='loftq' needs a quantised base, and none of the adapter's "
    "layers is quantised: over a plain base it replaces weights, which all adapters share; quantise the "
    "base, or use 'pissa'"
)
"""Why LoftQ does not serve an adapter whose layers have plain weights."""
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""Children of one module that get the same x in Transformers' models. A guess: each call checks x."""


def add_adapter(
    model: nn.Module, name: str, config: LoraConfig, *, seed: int = 0, autocast_adapter_dtype: bool = True
) -> None:
    """Adds an adapter to a converted model; the others do not move.

    At the end it warns of an entry of the config that matches nothing beside others that do, of
    `ensure_weight_tying` that ties nothing, and of trained parts that PEFT computes otherwise.

    Args:
        model: converted by `convert_model`.
        name: of the new adapter.
        config: PEFT's config.
        seed: for initial values and dropout.
        autocast_adapter_dtype: as in `convert_model`, for layers that get their first adapter.

    Raises:
        ValueError: if the name is taken, the name or config is not supported, the targets match nothing, or a
            layer has hooks, a replaced `forward`, or weights that require a gradient or are quantized in an
            unknown format.
    """
    put_on(model, name, config, seed=seed, autocast_adapter_dtype=autocast_adapter_dtype)
    warn_of_entries(model, {name: config})


def put_on(
    model: nn.Module, name: str, config: LoraConfig, *, seed: int = 0, autocast_adapter_dtype: bool = True
) -> None:
    """Does what `add_adapter` does, without its warnings."""
    if not isinstance(name, str):
        raise ValueError(f"name: expected a name before the config, got {type(name).__name__}")
    router = router_of(model)
    if name in router.adapters:
        raise AdapterError(
            name,
            "the model already has an adapter of this name; choose another name, or call "
            "remove_adapter first",
        )
    plan = plan_adapter(model, name, config)
    refuse_state(model, {name: plan})
    _refuse_trained(model, plan)
    put_planned(model, {name: config}, {name: plan}, seed, autocast_adapter_dtype)


def remove_adapter(model: nn.Module, name: str) -> None:
    """Removes an adapter from a converted model; the others do not move.

    Args:
        model: converted by `convert_model`.
        name: of the adapter.

    Raises:
        ValueError: if the model has no adapter of this name.
    """
    router = router_of(model)
    router.check_names("name", [name])
    for layer in adapter_layers(model, name).values():
        layer.take(name)
    del router.adapters[name]
    if router.held_gradients is not None:
        router.held_gradients.forget(name)
    router.default = None if router.default == name else router.default
    regroup(model)


def _refuse_trained(model: nn.Module, plan: Mapping[str, LayerSpec]) -> None:
    """Raises ValueError for a target that requires a gradient: someone unfroze it in order to train it."""
    for key in plan:
        for name, parameter in model.get_submodule(key).named_parameters(recurse=False):
            if parameter.requires_grad:
                raise ValueError(
                    f"layer {key}: its {name} requires a gradient, but layers with adapters are frozen; call "
                    "requires_grad_(False) on it, or target other layers"
                )


def plan_adapter(model: nn.Module, name: str, config: LoraConfig) -> dict[str, LayerSpec]:
    """Checks a new adapter's name, config and targets; returns its layers."""
    check_name(name)
    kind_for(name, config).check(name, config)
    plan = target_layers(model, name, config)
    _refuse_unserved(model, name, config, plan)
    refuse_conflicts(model, {name: plan})
    _refuse_base_of_loftq(model, name, config, plan)
    return plan


def _refuse_unserved(model: nn.Module, name: str, config: LoraConfig, plan: Mapping[str, LayerSpec]) -> None:
    """Raises ValueError for a layer on which adapters of this kind cannot sit."""
    for key, spec in plan.items():
        module = model.get_submodule(key)
        try:
            layer_kind(module, spec.kind)
        except ValueError as error:
            what = type(plain_module(module)).__name__
            asked = kind_setting(config)
            has = f"has {asked}" if asked else f"is of kind {spec.kind!r}"
            others = f", or {asked} out of its config" if asked else ""
            raise AdapterError(
                name,
                f"layer {key} is of class {what}, which serves plain LoRA only, and this "
                f"adapter {has}; leave the layer out of its targets{others}",
            ) from error


def _refuse_base_of_loftq(
    model: nn.Module, name: str, config: LoraConfig, plan: Mapping[str, LayerSpec]
) -> None:
    """Raises ValueError for LoftQ over a base that is not quantised, or by AWQ.

    A model with layers on the meta device is a piece of one, which cannot tell whether another is quantised.
    """
    if not needs_weights(config):
        return
    for key in plan:
        if is_awq(model.get_submodule(key)):
            raise AdapterError(
                name,
                f"layer {key}: init_lora_weights='loftq' is not supported over AWQ, which "
                "scales W's columns and the layer before: the difference to the original W is not what the "
                "quantisation lost; quantise the original model with bitsandbytes or torchao, or use plain "
                "LoRA",
            )
    whole = not any(parameter.is_meta for parameter in model.parameters())
    if whole and not any(is_quantized(model.get_submodule(key)) for key in plan):
        raise AdapterError(name, NO_QUANTIZED_LAYER)


def put_planned(
    model: nn.Module,
    adapters: Mapping[str, LoraConfig],
    plans: Mapping[str, Mapping[str, LayerSpec]],
    seed: int,
    autocast: bool,
    every: bool = False,
) -> None:
    """Puts adapters on their plans' layers; `every` also replaces all other linear layers but the head.

    Layers that get their first adapter are replaced; for several new adapters each reserves one page.
    """
    router, dtype = router_of(model), _dtype_of(model)
    rows: dict[str, int] = {}
    for plan in plans.values():
        for key, spec in plan.items():
            rows[key] = rows.get(key, 0) + spec.rank
    for index, key, module in _wanted(model, plans, every):
        specs = [plan[key] for plan in plans.values() if key in plan]
        wanted = layer_kind(module, specs[0].kind) if specs else MultiLoRALinear
        if type(module) is not wanted and (specs or not isinstance(module, AdapterLayer)):
            module = _replace(model, wanted, LayerPlace(router, key, index, autocast, dtype))
        if len(plans) > 1 and key in rows and isinstance(module, MultiLoRALinear):
            module.lora_A.reserve(rows[key])
            module.lora_B.reserve(rows[key])
    try:
        for name, config in adapters.items():
            _join(model, name, config, plans[name], seed)
    finally:
        regroup(model)


def _wanted(
    model: nn.Module, plans: Mapping[str, Mapping[str, LayerSpec]], every: bool
) -> list[tuple[int, str, nn.Module]]:
    """Returns index, name and module of the targets, with `every` of all linear layers but the head, too.

    Indices count linear layers; other layers, which drop nothing, have none.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    targets = {key: None for plan in plans.values() for key in plan}
    linear = linear_layers(model)
    found = [
        (index, key, module)
        for index, (key, module) in enumerate(linear.items())
        if key in targets or (every and module is not head)
    ]
    return found + [(-1, key, model.get_submodule(key)) for key in targets if key not in linear]


def refuse_state(model: nn.Module, plans: Mapping[str, Mapping[str, LayerSpec]], every: bool = False) -> None:
    """Raises ValueError, before any change, for a layer with state that conversion would lose."""
    refuse_conflicts(model, plans)
    copied = {key for plan in plans.values() for key, spec in plan.items() if spec.kind == TRAINED_COPY}
    for _, key, module in _wanted(model, plans, every):
        if isinstance(module, AdapterLayer):
            continue
        if key in copied:
            check_module(key, module)
        elif isinstance(module, nn.Embedding):
            check_module(key, module, MOVED)  # the layer calls the embedding, so its hooks still run
        else:
            check_layer(key, module, own_parts=not MultiLoRALinear.serves(module))


def _dtype_of(model: nn.Module) -> torch.dtype:
    """Returns the dtype of a model's activations: that of its first parameter that is not quantised."""
    wide = (p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize > 1)
    return next(wide, torch.get_default_dtype())


def _replace(model: nn.Module, wanted: type[AdapterLayer], place: LayerPlace) -> AdapterLayer:
    module = plain_module(model.get_submodule(place.name))
    layer = wanted.of(module, place)
    layer.train(asked_mode(module))
    parent, _, child = place.name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)
    return layer


def _join(model: nn.Module, name: str, config: LoraConfig, plan: Mapping[str, LayerSpec], seed: int) -> None:
    """Gives an adapter its Parameters in converted layers; if that fails, no layer keeps any of them."""
    info = AdapterInfo(copy.deepcopy(config), named_seed(seed, name, "dropout"), seed)
    awaits, router = needs_data(config) or needs_weights(config), router_of(model)
    try:
        for key, spec in plan.items():
            layer = model.get_submodule(key)
            assert isinstance(layer, AdapterLayer)
            layer.put(name, config, spec, named_seed(seed, name, key))
            if spec.tied_to:
                assert isinstance(layer, RowSource | TrainedCopies)
                layer.tie(name, model.get_submodule(spec.tied_to))
            info.awaits_start |= layer.frozen.device.type != "meta" and awaits
        router.adapters[name] = info
    finally:
        if name not in router.adapters:
            for layer in adapter_layers(model, name).values():
                layer.take(name)


def named_seed(seed: int, *parts: str) -> int:
    """Derives a 63-bit seed from a seed and names; the same on every machine and in any order of calls."""
    digest = hashlib.sha256("\0".join([str(seed), *parts]).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def regroup(model: nn.Module) -> None:
    """Puts layers with the same adapters, scalings and dropouts into one group."""
    router = router_of(model)
    groups: dict[Any, LayerGroup] = {}
    layers = {key: module for key, module in model.named_modules() if isinstance(module, AdapterLayer)}
    for module in layers.values():
        names = tuple(name for name in router.adapters if name in module.specs)
        module.note_kinds()
        scaling = tuple(module.specs[name].scaling for name in names)
        dropout = tuple(module.specs[name].dropout for name in names)
        key = (names, scaling, dropout, module.frozen.device, scaling_dtype(module.frozen.dtype))
        module.group = groups.setdefault(key, LayerGroup(*key))
    router.regroup(list(groups.values()))
    linear = {key: module for key, module in layers.items() if isinstance(module, MultiLoRALinear)}
    router.fused_projections = _find_fused_projections(linear)
    if "set_adapter" in model.__dict__:  # it has Transformers' adapter interface, whose helpers look these up
        model.__dict__["peft_config"] = {name: info.config for name, info in router.adapters.items()}
        model.__dict__["_hf_peft_config_loaded"] = bool(router.adapters)


def _find_fused_projections(layers: Mapping[str, MultiLoRALinear]) -> list[FusedProjections]:
    """Groups converted layers that share their input, and returns the groups.

    Runs again when adapters are added or removed: layers of a group have the same adapters and scalings.
    """
    parents: dict[str, dict[str, MultiLoRALinear]] = {}
    for key, layer in layers.items():
        parent, _, child = key.rpartition(".")
        parents.setdefault(parent, {})[child] = layer
    found = []
    for children in parents.values():
        for names in _FUSED:
            ours = [children[name] for name in names if name in children]
            for group in {layer.group for layer in ours}:
                alike = [layer for layer in ours if layer.group is group]
                fused_projections = FusedProjections(alike) if len(alike) > 1 and group.adapters else None
                for layer in alike:
                    layer.fused_projections = fused_projections
                found += [fused_projections] if fused_projections else []
    return found
