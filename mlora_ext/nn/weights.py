"""An adapter's weights in a converted model: where they are, and writing them once they are checked."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from .linear import MultiLoRALinear
from .routing.router import router_of
from .targets import features


def adapter_layers(model: nn.Module, name: str) -> dict[str, MultiLoRALinear]:
    """The layers that an adapter sits on, by name, in the model's order."""
    return {
        key: module
        for key, module in model.named_modules()
        if isinstance(module, MultiLoRALinear) and name in module.lora_A
    }


def adapter_parameters(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """An adapter's Parameters by their names in the model's state dict.

    `lora_B` is a transposed view of rows and not contiguous. `torch.optim.LBFGS` and
    `torch.nn.utils.parameters_to_vector` fail on it ("view size is not compatible"); other optimizers do not.
    For those two give it memory of its own, `p.data = p.data.contiguous()`, and anew after each `.to`.

    Of a model some of whose layers are on the meta device, because other processes hold them, these are all
    of the adapter's parameters; those that are here are the ones that are not `is_meta`.

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
