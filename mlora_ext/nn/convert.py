"""Putting adapters on a model, and taking them off: convert_model, add_adapter, remove_adapter."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..adapters.lora_config import check_config, check_name, init_kind
from ..frozen.plain import PackedWeight
from ..ops.functional import scaling_dtype
from . import checkpointing, forward
from .base_dropout import stop_base_dropout
from .batch_statistics import refuse_batch_statistics, stop_batch_statistics
from .fused_projections import FusedProjections
from .interop import adapter_interface
from .linear import MultiLoRALinear
from .routing.route import LayerGroup, LayerSpec
from .routing.router import AdapterInfo, Router, router_of
from .targets import (
    adapter_dtype,
    is_transposed,
    linear_layers,
    target_layers,
)
from .unconverted_state import check_layer
from .weights import adapter_layers

if TYPE_CHECKING:
    from peft import LoraConfig

_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""Children of one module that are given the same x in Transformers' models. Only a guess: whether x is the
same is seen at each call."""


def convert_model(
    model: nn.Module,
    adapters: Mapping[str, LoraConfig],
    *,
    seed: int = 0,
    autocast_adapter_dtype: bool = True,
    every_linear: bool = False,
) -> nn.Module:
    """Freeze a model and put adapters on it, in place.

    Layers are targeted by PEFT's own functions, so the adapters sit where PEFT would put them. Initial
    values have PEFT's distributions and depend on the seed, the adapter's name and the layer's name only,
    never on the other adapters. Dropouts of the base model are set to 0, and its batch normalisations stay in
    evaluation mode.

    Args:
        model: any module with `nn.Linear` or `Conv1D` layers.
        adapters: PEFT's `LoraConfig` by adapter name; with `inference_mode=True` the adapter is frozen.
        seed: of initial values and dropout.
        autocast_adapter_dtype: keep adapters of a bf16 or fp16 base in fp32, as PEFT does. Unlike PEFT's,
            `scaling x A^T` keeps the dtype of x: in an fp16 base values above 65504 are inf.
        every_linear: replace the linear layers that no adapter targets as well, all but the output head, so
            that they too use the base GEMM that was measured to be the fastest.

    Returns:
        `model` itself. Its forward and `generate` take `adapter_names=`.

    Raises:
        ValueError: if the model is converted already, a name or a config is not supported, targets match
            nothing, or a layer has hooks, another `forward` or quantized weights, which would be lost; the
            model is as it was then.

    Example:
        >>> model = convert_model(model, {"a": LoraConfig(r=8), "b": LoraConfig(r=64, use_rslora=True)})
        >>> out = model(input_ids=ids, adapter_names=["a", "a", "b"])
    """
    if not isinstance(adapters, Mapping):
        raise ValueError(
            f"adapters: expected configs by name, {{'a': LoraConfig(...)}}, got {type(adapters).__name__}"
        )
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a module, got {type(model).__name__}")
    if any(isinstance(module, MultiLoRALinear) for module in model.modules()):
        raise ValueError("model: is converted already; use mlora_ext.add_adapter to give it another adapter")
    _refuse_peft(model)
    plans = {name: plan_adapter(model, name, config) for name, config in adapters.items()}
    _refuse_state(model, plans, every_linear)
    _refuse_generate(model)
    refuse_batch_statistics(model)
    model.__dict__["mlora_router"] = Router()
    model.requires_grad_(False)
    stop_base_dropout(model)
    stop_batch_statistics(model)
    forward.install(model)
    checkpointing.install(model)
    adapter_interface.install(model)
    _convert_layers(model, plans, autocast_adapter_dtype, every_linear)
    for name, config in adapters.items():
        _join(model, name, config, plans[name], seed)
    _regroup(model)
    return model


def add_adapter(
    model: nn.Module, name: str, config: LoraConfig, *, seed: int = 0, autocast_adapter_dtype: bool = True
) -> None:
    """Put one more adapter on a converted model; the others do not move.

    Args:
        model: converted by `convert_model`.
        name: of the new adapter.
        config: PEFT's config.
        seed: of initial values and dropout.
        autocast_adapter_dtype: as in `convert_model`, for layers that get their first adapter.

    Raises:
        ValueError: if the name is taken, the name or config is not supported, targets match nothing, or a
            layer has hooks, another `forward`, or weights that are quantized or require a gradient.
    """
    if not isinstance(name, str):
        raise ValueError(f"name: expected the new adapter's name before its config, got {name!r}")
    router = router_of(model)
    if name in router.adapters:
        raise ValueError(f"adapter {name!r}: the model has an adapter of this name; remove_adapter it first")
    plan = plan_adapter(model, name, config)
    _refuse_state(model, {name: plan})
    _refuse_trained(model, plan)
    _convert_layers(model, {name: plan}, autocast_adapter_dtype)
    _join(model, name, config, plan, seed)
    _regroup(model)


def remove_adapter(model: nn.Module, name: str) -> None:
    """Take an adapter off a converted model; the others do not move.

    Raises:
        ValueError: if the model has no adapter of this name.
    """
    router = router_of(model)
    router.check_names("name", [name])
    for layer in adapter_layers(model, name).values():
        layer.lora_A.remove(name)
        layer.lora_B.remove(name)
        del layer.specs[name]
    del router.adapters[name]
    router.default = None if router.default == name else router.default
    _regroup(model)


def _refuse_peft(model: nn.Module) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(
            "model: has PEFT's layers already; use mlora_ext.from_peft to take its adapters over"
        )


def _refuse_generate(model: nn.Module) -> None:
    if "generate" in vars(model):
        raise ValueError(
            "model: its generate was replaced on the instance, which conversion would drop: delete that "
            "attribute before it"
        )


def _refuse_trained(model: nn.Module, plan: Mapping[str, LayerSpec]) -> None:
    """The base of a converted model is frozen: whoever unfroze a part of it since wants to train it."""
    for key in plan:
        for name, parameter in model.get_submodule(key).named_parameters(recurse=False):
            if parameter.requires_grad:
                raise ValueError(
                    f"layer {key}: its {name} requires a gradient, and layers with adapters are frozen: call "
                    "requires_grad_(False) on it first, or target other layers"
                )


def plan_adapter(model: nn.Module, name: str, config: LoraConfig) -> dict[str, LayerSpec]:
    """The layers of an adapter-to-be, after all that can be refused has been."""
    check_name(name)
    check_config(name, config)
    return target_layers(model, name, config)


def _convert_layers(
    model: nn.Module, plans: Mapping[str, Mapping[str, LayerSpec]], autocast: bool, every: bool = False
) -> None:
    """Replace the layers that get their first adapter, and reserve one page for all of a layer's adapters."""
    router = router_of(model)
    rows: dict[str, int] = {}
    for plan in plans.values():
        for key, spec in plan.items():
            rows[key] = rows.get(key, 0) + spec.rank
    for index, key, module in _wanted(model, plans, every):
        if not isinstance(module, MultiLoRALinear):
            module = _replace(model, key, module, router, index, autocast)
        if len(plans) > 1 and key in rows:
            module.lora_A.reserve(rows[key])
            module.lora_B.reserve(rows[key])


def _wanted(
    model: nn.Module, plans: Mapping[str, Mapping[str, LayerSpec]], every: bool
) -> list[tuple[int, str, nn.Module]]:
    """Index, name and module of the linear layers that get adapters, or all but the output head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    targets = {key for plan in plans.values() for key in plan}
    return [
        (index, key, module)
        for index, (key, module) in enumerate(linear_layers(model).items())
        if key in targets or (every and module is not head)
    ]


def _refuse_state(
    model: nn.Module, plans: Mapping[str, Mapping[str, LayerSpec]], every: bool = False
) -> None:
    """Before anything is changed: what layers that are replaced have beside weights would be lost."""
    for _, key, module in _wanted(model, plans, every):
        if not isinstance(module, MultiLoRALinear):
            check_layer(key, module)


def _replace(
    model: nn.Module, key: str, module: nn.Module, router: Router, index: int, autocast: bool
) -> MultiLoRALinear:
    weight: Any = module.weight
    bias: Any = module.bias
    layer = MultiLoRALinear(
        weight,
        bias,
        router=router,
        name=key,
        index=index,
        fan_in_fan_out=is_transposed(module),
        adapter_dtype=adapter_dtype(weight, autocast),
    )
    layer.train(module.training)
    if router.packs_base:
        layer.packed = PackedWeight()
    parent, _, child = key.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)
    return layer


def _join(model: nn.Module, name: str, config: LoraConfig, plan: Mapping[str, LayerSpec], seed: int) -> None:
    for key, spec in plan.items():
        layer = model.get_submodule(key)
        assert isinstance(layer, MultiLoRALinear)
        layer.specs[name] = spec
        a = layer.lora_A.add(name, spec.rank)
        b = layer.lora_B.add(name, spec.rank)
        for parameter in (a, b):
            parameter.requires_grad_(not config.inference_mode)
        _initialise(a, b, init_kind(config), spec.rank, named_seed(seed, name, key))
    router_of(model).adapters[name] = AdapterInfo(copy.deepcopy(config), named_seed(seed, name, "dropout"))


def _initialise(a: nn.Parameter, b: nn.Parameter, how: Any, rank: int, seed: int) -> None:
    """PEFT's initial values, drawn on the CPU in fp32: the same on any device and in any dtype.

    On the meta device there is nothing to draw: the layer is another process's.
    """
    if a.is_meta:
        return
    generator = torch.Generator("cpu").manual_seed(seed)
    values = torch.empty(a.shape, dtype=torch.float32, device="cpu")
    if how == "gaussian":
        nn.init.normal_(values, std=1 / rank, generator=generator)
    else:
        nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    with torch.no_grad():
        a.copy_(values)
        if how is False:
            bound = 1 / math.sqrt(rank)
            values = torch.empty(b.shape, dtype=torch.float32, device="cpu")
            b.copy_(values.uniform_(-bound, bound, generator=generator))


def named_seed(seed: int, *parts: str) -> int:
    """A 63-bit seed from a seed and names: the same on every machine, independent of order."""
    digest = hashlib.sha256("\0".join([str(seed), *parts]).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _regroup(model: nn.Module) -> None:
    """Let layers with the same adapters, ranks aside, share one group."""
    router = router_of(model)
    groups: dict[Any, LayerGroup] = {}
    layers = {key: module for key, module in model.named_modules() if isinstance(module, MultiLoRALinear)}
    for module in layers.values():
        names = tuple(name for name in router.adapters if name in module.lora_A)
        scaling = tuple(module.specs[name].scaling for name in names)
        dropout = tuple(module.specs[name].dropout for name in names)
        key = (names, scaling, dropout, module.weight.device, scaling_dtype(module.weight.dtype))
        module.group = groups.setdefault(key, LayerGroup(*key))
    router.regroup(list(groups.values()))
    router.fused_projections = _find_fused_projections(layers)
    adapter_interface.refresh(model)


def _find_fused_projections(layers: Mapping[str, MultiLoRALinear]) -> list[FusedProjections]:
    """Group converted layers that share their input, and return the groups.

    Runs again whenever adapters join or leave: layers of a group have the same adapters, scalings and
    dropouts.
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
