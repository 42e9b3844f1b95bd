"""Finds, checks, writes and counts adapters' weights in a converted model; chooses and disables adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..adapters.kind import LayerSpec
from ..errors import AdapterError
from ..routing.router import Router, router_of
from .adapter_layer import AdapterLayer
from .layer_kinds import layer_kind
from .linear import MultiLoRALinear

LayerWeights = Mapping[str, Mapping[str, torch.Tensor]]
"""Tensors by layer name and Parameter name, such as `lora_A`."""

_NEUTRAL = "default"
"""PEFT's usual name of an adapter."""


def adapter_layers(model: nn.Module, name: str) -> dict[str, AdapterLayer]:
    """Returns the layers that an adapter sits on, by name, in the model's order."""
    return {
        key: module
        for key, module in model.named_modules()
        if isinstance(module, AdapterLayer) and name in module.specs
    }


def adapter_parameters(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Returns an adapter's Parameters by their names in the model's state dict.

    `lora_B` is a transposed view and not contiguous. `torch.optim.LBFGS` and
    `torch.nn.utils.parameters_to_vector` fail on it ("view size is not compatible"); other optimizers work.
    For those two, give it its own memory with `p.data = p.data.contiguous()`, and again after each `.to`.

    If other processes hold some of the layers, those layers are on the meta device here. The result still has
    all of the adapter's Parameters; this process holds those that are not `is_meta`.

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
        f"{key}.{layer.state_key(name, part)}": parameter
        for key, layer in adapter_layers(model, name).items()
        for part, parameter in layer.parameters_of(name).items()
    }


def saved_tensors(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """Returns what is saved of an adapter, as `adapter_parameters` does, with the buffers of its copies."""
    return {
        f"{key}.{layer.state_key(name, part)}": tensor
        for key, layer in adapter_layers(model, name).items()
        for part, tensor in layer.tensors_of(name).items()
    }


def neutral_names(model: nn.Module, name: str) -> dict[str, str]:
    """Returns what the keys of `adapter_parameters` would be if the adapter were called `default`.

    Rules that read names, such as "no weight decay for biases", read these: an adapter called `debias` has
    "bias" in every key.

    Args:
        model: converted by `convert_model`, or a part of such a model.
        name: of the adapter.

    Returns:
        `{"<layer>.lora_A.<name>.weight": "<layer>.lora_A.default.weight", ...}`.
    """
    return {
        f"{key}.{layer.state_key(name, part)}": f"{key}.{layer.state_key(_NEUTRAL, part)}"
        for key, layer in adapter_layers(model, name).items()
        for part in layer.parameters_of(name)
    }


def peft_keys(module: nn.Module, spec: LayerSpec) -> dict[str, str]:
    """Returns, by name of an adapter's Parameters on a module, their keys in PEFT's files after the module's.

    Args:
        module: converted or not.
        spec: the adapter's settings there.
    """
    return layer_kind(module, spec.kind).peft_keys(module, spec)


def written_marks(model: nn.Module, name: str) -> list[set[str]]:
    """Returns where each of an adapter's Parameters in this process is noted; see `mlora_ext.ops.held`.

    In the order of `adapter_parameters`, without those on the meta device.
    """
    return [
        layer.written
        for layer in adapter_layers(model, name).values()
        for parameter in layer.parameters_of(name).values()
        if not parameter.is_meta
    ]


def scalings(model: nn.Module, name: str) -> list[float]:
    """Returns the layer's scaling of each of an adapter's Parameters, in the order of `written_marks`."""
    return [
        layer.specs[name].scaling
        for layer in adapter_layers(model, name).values()
        for parameter in layer.parameters_of(name).values()
        if not parameter.is_meta
    ]


def write_weights(model: nn.Module, name: str, layers: LayerWeights) -> None:
    """Copies weights into an adapter after `check_weights` has checked all of them."""
    mine = adapter_layers(model, name)
    check_weights(model, name, {key: layer.specs[name] for key, layer in mine.items()}, layers)
    with torch.no_grad():
        for key, tensors in layers.items():
            for part, tensor in mine[key].tensors_of(name).items():
                tensor.copy_(tensors[part])
    router_of(model).adapters[name].awaits_start = False


def check_weights(model: nn.Module, name: str, specs: Mapping[str, LayerSpec], layers: LayerWeights) -> None:
    """Compares weights with an adapter of these specs, before anything is changed.

    Raises ValueError, naming the first layer that is missing, unknown or of another shape.
    """
    for key in [*specs, *layers]:
        if key not in layers and specs[key].tied_to:
            continue
        if key not in layers or key not in specs:
            side = "the weights to load" if key not in layers else "the model's adapter"
            raise AdapterError(name, f"layer {key} is missing in {side}; use an adapter of this base model")
        module = model.get_submodule(key)
        kind = layer_kind(module, specs[key].kind)
        expected: dict[str, Any] = {**kind.shapes(module, specs[key]), **kind.buffer_shapes(module)}
        if expected.keys() != layers[key].keys():
            raise AdapterError(
                name, f"layer {key}: expected {', '.join(expected)}, got {', '.join(layers[key])}"
            )
        for part, spec in expected.items():
            shape = list(layers[key][part].shape)
            if shape != list(spec.shape):
                raise AdapterError(
                    name,
                    f"layer {key}.{part}: expected shape {list(spec.shape)}, "
                    f"got {shape}; use an adapter of this base model and rank",
                )


def refuse_bypassed_head(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Raises ValueError if TRL's fused head, which reads the head's weight itself, would skip an adapter."""
    head = model.get_output_embeddings() if arguments.get("fused_lm_head") else None  # type: ignore[operator]
    if isinstance(head, MultiLoRALinear) and head.specs:
        raise ValueError(
            f"layer {head.name}: TRL's fused_lm_head reads the layer's weight and skips its adapters "
            f"({', '.join(head.specs)}); remove this layer from their target_modules"
        )


def one_adapter(model: nn.Module, name: str | None) -> str:
    """Returns the adapter of that name; for None the one that `set_adapter` named, or the only one.

    Raises ValueError if the model has no such adapter, or has several and none is named.
    """
    if name is not None and not isinstance(name, str):
        raise ValueError(f"adapter_name: expected the name of one adapter, got {name!r}")
    router = router_of(model)
    chosen = name or router.default
    if chosen is None and len(router.adapters) != 1:
        known = ", ".join(router.adapters) or "none"
        raise ValueError(f"adapter_name: expected one of the model's adapters ({known}), got {name!r}")
    chosen = chosen or next(iter(router.adapters))
    router.check_names("adapter_name", [chosen])
    return chosen


@contextmanager
def disable_adapter(model: nn.Module) -> Iterator[None]:
    """Disables all adapters for forward calls inside the context: the base model alone computes.

    Forward calls may still give `adapter_names`. They are checked, but change nothing.

    Args:
        model: converted by `convert_model`.

    Raises:
        ValueError: if a route is active: it was built with its adapters.

    Example:
        >>> with disable_adapter(model):
        ...     reference = model(input_ids=ids, adapter_names=names).logits
    """
    router = router_of(model)
    before = router.disabled
    disable(router)
    try:
        yield
    finally:
        router.disabled = before


def disable(router: Router) -> None:
    """Disables all adapters; raises ValueError if a route is active."""
    if router.active is not None:
        raise ValueError("a route is active: disable the adapters before you enter mlora_ext.route(...)")
    router.disabled = True


def print_trainable_parameters(model: nn.Module) -> None:
    """Prints how many of all parameters are trainable, as `PeftModel` does.

    With several adapters it also prints a line for each.

    Args:
        model: converted by `convert_model`.
    """
    groups = {"trainable params": list(model.parameters())}
    names = list(router_of(model).adapters)
    for name in names if len(names) > 1 else ():
        groups[f"adapter {name}"] = list(adapter_parameters(model, name).values())
    whole = sum(parameter.numel() for parameter in model.parameters())
    for title, parameters in groups.items():
        count = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        print(f"{title}: {count:,d} || all params: {whole:,d} || trainable%: {100 * count / whole:.4f}")
