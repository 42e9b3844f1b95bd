"""Finds, checks and writes an adapter's weights in a converted model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..adapters.kind import LayerSpec
from ..errors import AdapterError
from ..routing.router import router_of
from .adapter_layer import AdapterLayer
from .layer_kinds import layer_kind

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
