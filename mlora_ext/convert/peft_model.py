"""Takes the adapters of a PEFT model over: from_peft."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from ..adapters.kind import one_by_one
from ..adapters.lora_config import check_name
from ..adapters.registry import kind_for
from ..errors import AdapterError
from ..interop.peft_layers import PeftLayers, base_of, plain_key
from ..interop.read_folder import changed_base, without_start
from ..layers.adapter_layer import AdapterLayer
from ..layers.adapter_weights import check_weights, write_weights
from ..targets.add_remove import plan_adapter
from ..targets.find import target_layers
from ..targets.refuse import check_untouched, move_hooks
from .model import convert_silently

if TYPE_CHECKING:
    from peft import LoraConfig, LoraModel, PeftModel

_PEFT_FIELDS = ("peft_config", "_hf_peft_config_loaded")


def from_peft(peft_model: PeftModel | LoraModel | nn.Module, *, seed: int = 0) -> nn.Module:
    """Turns a PEFT model with LoRA adapters into a converted model with the same adapters and weights.

    The adapters may be plain LoRA, DoRA or have a `lora_bias`. It keeps PEFT's scalings (`set_scale`),
    dropout probabilities and training mode, and which Parameters are frozen. An adapter that PEFT froze only
    because it is not active may be trained. Hooks on PEFT's LoRA layers run with the converted layers.
    Anything else that would be lost is refused. An optimizer of the PEFT model holds parameters that are no
    longer used: make a new one.

    Args:
        peft_model: made by `get_peft_model`, a `LoraModel`, or a model with adapters from
            `inject_adapter_in_model` or Transformers' `add_adapter`. Its base model is taken out and
            converted in place; do not use the PEFT model afterwards.
        seed: for dropout.

    Returns:
        The base model, converted.

    Raises:
        ValueError: if the model has no LoRA adapters, an adapter is of another kind, is merged or disabled,
            its config is not supported, a base weight requires a gradient, or hooks or patches would be lost.
            The PEFT model is unchanged then.
    """
    base, configs = _taken_apart(peft_model)
    layers = PeftLayers(base, configs)
    _refuse_trained_base(base, layers)
    with _unwrapped(base, layers):
        for name, config in configs.items():
            configs[name] = _with_scaling(base, name, config, layers.scaling(name))
            configs[name].lora_dropout = layers.dropout(name, config.lora_dropout)
            plan = plan_adapter(base, name, configs[name])
            check_weights(base, name, plan, layers.weights(name))
        warn = convert_silently(base, configs, seed=seed, autocast_adapter_dtype=not layers.keep_dtype())
    for name in configs:
        write_weights(base, name, layers.weights(name))
    _carry_over(base, layers)
    warn()
    return base


def _taken_apart(model: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """Returns the base model, with PEFT's layers in it, and the adapters' configs."""
    from peft import PeftModel
    from peft.tuners.lora import LoraModel

    if not isinstance(model, nn.Module):
        raise ValueError(f"peft_model: expected a model with PEFT's adapters, got {type(model).__name__}")
    if any(isinstance(module, AdapterLayer) for module in model.modules()):
        raise ValueError("peft_model: is already converted; use mlora_ext.add_adapter to add an adapter")
    configs = getattr(model, "peft_config", None) if isinstance(model, PeftModel) else None
    configs = configs or vars(model).get("peft_config")
    if not configs or not isinstance(configs, Mapping):
        raise ValueError(
            "peft_model: expected a PeftModel, a LoraModel, or a model with adapters from "
            f"inject_adapter_in_model or add_adapter, got a plain {type(model).__name__}; convert it with "
            "mlora_ext.convert_model"
        )
    for name, config in configs.items():
        check_name(name)
        kind = kind_for(name, config)
        if (reason := changed_base(config)) is not None:
            raise AdapterError(name, reason)
        kind.check(name, without_start(config))
    base: Any = model
    if isinstance(base, PeftModel):
        check_untouched("peft_model", base)
        base = base.base_model
    if isinstance(base, LoraModel):
        check_untouched("peft_model: its LoraModel", base)
        base = base.model
    return base, {name: without_start(config) for name, config in configs.items()}


def _refuse_trained_base(base: nn.Module, layers: PeftLayers) -> None:
    """Raises ValueError if a base weight requires a gradient: someone unfroze it in order to train it."""
    adapters = {id(parameter) for *_, parameter in layers.parameters()}
    for key, parameter in base.named_parameters():
        if parameter.requires_grad and id(parameter) not in adapters:
            raise ValueError(
                f"peft_model: {key.replace('.base_layer.', '.')} of the base requires a gradient, but "
                "adapters share a frozen base; call requires_grad_(False) on it"
            )


@contextmanager
def _unwrapped(base: nn.Module, layers: PeftLayers) -> Iterator[None]:
    """Takes PEFT's layers out of the base; puts them back if the body fails."""
    fields = {field: vars(base).pop(field) for field in _PEFT_FIELDS if field in vars(base)}
    _put(base, {key: base_of(layer) for key, layer in layers.layers.items()})
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            _put(base, layers.layers)
            vars(base).update(fields)


def _put(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    for key, module in modules.items():
        parent, _, child = key.rpartition(".")
        setattr(model.get_submodule(parent), child, module)


def _carry_over(model: nn.Module, layers: PeftLayers) -> None:
    """Takes frozen parameters, training mode and hooks over."""
    waiting = layers.waiting()
    for key, name, part, parameter in layers.parameters():
        own: Any = model.get_submodule(plain_key(key))
        own.parameters_of(name)[part].requires_grad_(parameter.requires_grad or name in waiting)
    for key, theirs in layers.layers.items():
        layer = model.get_submodule(key)
        layer.train(layers.mode(key))
        move_hooks(theirs, layer)
    if any(layers.drops(key) for key in layers.layers):
        model.training = True  # only this module: its forward passes count dropout steps


def _with_scaling(
    model: nn.Module, name: str, config: LoraConfig, scaling: Mapping[str, float]
) -> LoraConfig:
    """Returns a copy whose `lora_alpha` and `alpha_pattern` give these scalings.

    `scaling` is by name of the layer, or of the parameter; the adapter's other layers keep theirs.
    """
    plan = one_by_one(target_layers(model, name, config))
    if all(scaling.get(key, spec.scaling) == spec.scaling for key, spec in plan.items()):
        return config
    alphas = {
        key: scaling.get(key, spec.scaling) * (math.sqrt(spec.rank) if config.use_rslora else spec.rank)
        for key, spec in plan.items()
    }
    config = copy.deepcopy(config)
    config.lora_alpha = Counter(alphas.values()).most_common(1)[0][0]  # type: ignore[assignment]
    # PEFT takes the first pattern that matches the end of a name: longer ones first.
    config.alpha_pattern = {
        re.escape(key): alphas[key]
        for key in sorted(alphas, key=len, reverse=True)
        if alphas[key] != config.lora_alpha
    }
    return config
