"""Putting adapters on a model, and taking them off: convert_model, add_adapter, remove_adapter, from_peft."""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import checkpointing, forward
from .linear import MultiLoRALinear
from .routes import LayerGroup
from .routing import AdapterInfo, Router, router_of
from .targets import (
    LayerSpec,
    adapter_dtype,
    check_config,
    check_name,
    features,
    init_kind,
    is_linear,
    target_layers,
)

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


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
    never on the other adapters. Dropouts of the base model are set to 0.

    Args:
        model: any module with `nn.Linear` or `Conv1D` layers.
        adapters: PEFT's `LoraConfig` by adapter name.
        seed: of initial values and dropout.
        autocast_adapter_dtype: keep adapters of a bf16 or fp16 base in fp32, as PEFT does.
        every_linear: replace the linear layers that no adapter targets as well, all but the output head, so
            that they too use the base GEMM that was measured to be the fastest.

    Returns:
        `model` itself. Its forward and `generate` take `adapter_names=`.

    Raises:
        ValueError: if the model is converted already, a name or a config is not supported, or targets match
            nothing.

    Example:
        >>> model = convert_model(model, {"a": LoraConfig(r=8), "b": LoraConfig(r=64, use_rslora=True)})
        >>> out = model(input_ids=ids, adapter_names=["a", "a", "b"])
    """
    if any(isinstance(module, MultiLoRALinear) for module in model.modules()):
        raise ValueError("model: is converted already; use mlora_ext.add_adapter to give it another adapter")
    _refuse_peft(model)
    plans = {name: plan_adapter(model, name, config) for name, config in adapters.items()}
    _refuse_offloaded(model, plans, every_linear)
    model.__dict__["mlora_router"] = Router()
    model.requires_grad_(False)
    _stop_base_dropout(model)
    forward.install(model)
    checkpointing.install(model)
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
        ValueError: if the name is taken, or the name or config is not supported, or targets match nothing.
    """
    router = router_of(model)
    if name in router.adapters:
        raise ValueError(f"adapter {name!r}: the model has an adapter of this name; remove_adapter it first")
    plan = plan_adapter(model, name, config)
    _refuse_offloaded(model, {name: plan})
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
    _regroup(model)


def adapter_layers(model: nn.Module, name: str) -> dict[str, MultiLoRALinear]:
    """The layers that an adapter sits on, by name, in the model's order."""
    return {
        key: module
        for key, module in model.named_modules()
        if isinstance(module, MultiLoRALinear) and name in module.lora_A
    }


def adapter_parameters(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """An adapter's Parameters by their names in the model's state dict.

    Args:
        model: converted by `convert_model`, or a part of such a model.
        name: of the adapter.

    Returns:
        `{"<layer>.lora_A.<name>.weight": [r, d_in], "<layer>.lora_B.<name>.weight": [d_out, r], ...}`, in the
        model's order. The optimizer takes `.values()`.

    Raises:
        ValueError: if the model has no adapter of this name.
    """
    router_of(model).check_names("name", [name])
    return {
        f"{key}.{bank}.{name}.weight": getattr(layer, bank).parameter_of(name)
        for key, layer in adapter_layers(model, name).items()
        for bank in ("lora_A", "lora_B")
    }


def from_peft(peft_model: PeftModel, *, seed: int = 0) -> nn.Module:
    """Turn a PEFT model with LoRA adapters into a converted model with the same adapters and weights.

    Args:
        peft_model: its base model is taken out and converted in place; do not use the PEFT model afterwards.
        seed: of dropout.

    Returns:
        The base model, converted.

    Raises:
        ValueError: if an adapter is not plain LoRA, is merged, or its config is not supported; the PEFT model
            is as it was then.
    """
    from peft.tuners.lora import LoraLayer

    configs: dict[str, Any] = dict(peft_model.peft_config)
    base: Any = peft_model.base_model.model
    for name, config in configs.items():
        check_name(name)
        check_config(name, config)
    weights: dict[str, dict[str, Any]] = {name: {} for name in configs}
    for key, module in base.named_modules():
        if isinstance(module, LoraLayer):
            if module.merged:
                raise ValueError(
                    f"peft_model: adapters of {key} are merged into the base; unmerge_adapter first"
                )
            for name in module.lora_A:
                weights[name][key] = (module.lora_A[name].weight.data, module.lora_B[name].weight.data)
    _refuse_unloading(peft_model, configs, weights)
    halves = all(
        w.dtype in (torch.float16, torch.bfloat16)
        for per in weights.values()
        for ab in per.values()
        for w in ab
    )
    model = convert_model(peft_model.unload(), configs, seed=seed, autocast_adapter_dtype=not halves)
    for name, layers in weights.items():
        write_weights(model, name, layers)
    return model


def _refuse_unloading(
    peft_model: PeftModel, configs: Mapping[str, Any], weights: Mapping[str, dict[str, Any]]
) -> None:
    """Refuse on a copy that shares all tensors, so that a refused PEFT model keeps its adapters."""
    shared = {id(tensor): tensor for tensor in (*peft_model.parameters(), *peft_model.buffers())}
    base: Any = copy.deepcopy(peft_model, shared).unload()  # type: ignore[arg-type]
    plans = {name: plan_adapter(base, name, config) for name, config in configs.items()}
    _refuse_offloaded(base, plans)
    for name, plan in plans.items():
        check_weights(base, name, {key: spec.rank for key, spec in plan.items()}, weights[name])


def write_weights(
    model: nn.Module, name: str, layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Copy `(A [r, d_in], B [d_out, r])` by layer name into an adapter, after checking all of them.

    Raises:
        ValueError: naming the first layer that is missing, unknown or of another shape.
    """
    mine = adapter_layers(model, name)
    ranks = {key: layer.lora_A.parameter_of(name).shape[0] for key, layer in mine.items()}
    check_weights(model, name, ranks, layers)
    with torch.no_grad():
        for key, (a, b) in layers.items():
            mine[key].lora_A.parameter_of(name).copy_(a)
            mine[key].lora_B.parameter_of(name).copy_(b)


def check_weights(
    model: nn.Module,
    name: str,
    ranks: Mapping[str, int],
    layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Compare weights `(A, B)` by layer name with an adapter of these ranks, before anything is changed.

    Raises:
        ValueError: naming the first layer that is missing, unknown or of another shape.
    """
    for key in [*ranks, *layers]:
        if key not in layers or key not in ranks:
            side = "the weights to load" if key not in layers else "the model's adapter"
            raise ValueError(
                f"adapter {name!r}: layer {key} is missing in {side}; is it an adapter of another base?"
            )
        d_in, d_out = features(model.get_submodule(key))
        expected = {"lora_A": [ranks[key], d_in], "lora_B": [d_out, ranks[key]]}
        for (bank, shape), tensor in zip(expected.items(), layers[key], strict=True):
            if list(tensor.shape) != shape:
                raise ValueError(
                    f"adapter {name!r}: layer {key}.{bank}: expected shape {shape}, "
                    f"got {list(tensor.shape)}; is it an adapter of another base or rank?"
                )


def _refuse_peft(model: nn.Module) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(
            "model: has PEFT's layers already; use mlora_ext.from_peft to take its adapters over"
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


def _refuse_offloaded(
    model: nn.Module, plans: Mapping[str, Mapping[str, LayerSpec]], every: bool = False
) -> None:
    """Before anything is changed: accelerate's hooks sit on a module, and would be lost with it."""
    for _, key, module in _wanted(model, plans, every):
        if hasattr(module, "_hf_hook"):
            raise ValueError(
                f"layer {key}: is offloaded by accelerate; load the model without device_map offloading"
            )


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """All linear layers of a model, converted or not, by name: their positions are the layers' indices."""
    return {key: module for key, module in model.named_modules() if is_linear(module)}


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
        fan_in_fan_out=type(module) is not nn.Linear,
        adapter_dtype=adapter_dtype(weight, autocast),
    )
    layer.train(module.training)
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
        _initialise(a, b, init_kind(config), spec.rank, derived_seed(seed, name, key))
    router_of(model).adapters[name] = AdapterInfo(copy.deepcopy(config), derived_seed(seed, name, "dropout"))


def _initialise(a: nn.Parameter, b: nn.Parameter, how: Any, rank: int, seed: int) -> None:
    """PEFT's initial values, drawn on the CPU in fp32: the same on any device and in any dtype."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.empty(a.shape, dtype=torch.float32)
    if how == "gaussian":
        nn.init.normal_(values, std=1 / rank, generator=generator)
    else:
        nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    with torch.no_grad():
        a.copy_(values)
        if how is False:
            bound = 1 / math.sqrt(rank)
            b.copy_(torch.empty(b.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator))


def derived_seed(seed: int, *parts: str) -> int:
    """A 63-bit seed from a seed and names: the same on every machine, independent of order."""
    digest = hashlib.sha256("\0".join([str(seed), *parts]).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _regroup(model: nn.Module) -> None:
    """Let layers with the same adapters, ranks aside, share one group."""
    router = router_of(model)
    groups: dict[Any, LayerGroup] = {}
    for module in model.modules():
        if not isinstance(module, MultiLoRALinear):
            continue
        names = tuple(name for name in router.adapters if name in module.lora_A)
        scaling = tuple(module.specs[name].scaling for name in names)
        dropout = tuple(module.specs[name].dropout for name in names)
        key = (names, scaling, dropout, module.weight.device)
        module.group = groups.setdefault(key, LayerGroup(*key))
    router.regroup(list(groups.values()))


def _stop_base_dropout(model: nn.Module) -> None:
    """Set every dropout of the base to 0: a mask drawn for a whole batch ties its adapters together."""
    stopped = 0
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            module.p = 0.0
            stopped += 1
        stopped += _zero_dropout_fields(module)
    stopped += _zero_dropout_fields(getattr(model, "config", None))
    if stopped:
        warnings.warn(
            f"{stopped} dropouts of the base model were set to 0; use lora_dropout to regularise an adapter",
            stacklevel=3,
        )


def _zero_dropout_fields(owner: object) -> int:
    """Probabilities such as `attention_dropout`, which attention functions read; counts are left alone."""
    found = [
        key
        for key, value in getattr(owner, "__dict__", {}).items()
        if ("dropout" in key or key.endswith("pdrop"))
        and not key.startswith("summary_")
        and type(value) is float
        and 0 < value < 1
    ]
    for key in found:
        setattr(owner, key, 0.0)
    return len(found)
