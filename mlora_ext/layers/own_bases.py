"""Runs a layer in which some adapters have a base of their own, `W - scaling · B0 A0`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..adapters.kind import LayerSpec
from ..adapters.registry import adapter_kind
from ..backends.selection import backend_for
from ..frozen.weight import FrozenWeight
from ..ops.own_bases import OwnBases, own_products
from ..routing.route import RouteTensors


class AdaptedLayer(Protocol):
    """What is needed of a layer; see `MultiLoRALinear`."""

    specs: dict[str, LayerSpec]
    frozen: FrozenWeight

    def parameters_of(self, name: str) -> Mapping[str, Tensor]:
        """Returns an adapter's Parameters, by name."""

    def added(self, x: Tensor, active: RouteTensors, frozen: FrozenWeight) -> Tensor:
        """Returns the output over a frozen weight, with the low-rank parts of the route's adapters."""


def with_own_bases(layer: AdaptedLayer, names: Sequence[str], x: Tensor, active: RouteTensors) -> Tensor:
    """Returns the layer's output for a batch in which the adapters `names` have a base of their own."""
    fixed = [adapter_kind(layer.specs[name].kind).fixed_factors(layer.parameters_of(name)) for name in names]
    lora_a, lora_b = [a for a, _ in fixed], [b for _, b in fixed]
    x_dtype = _compute_dtype(x)
    if any(tensor.dtype not in (x_dtype, torch.float32) for tensor in (*lora_a, *lora_b)):
        lora_a, lora_b = [a.to(x_dtype) for a in lora_a], [b.to(x_dtype) for b in lora_b]
    plain = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    backend = "reference" if plain else backend_for(x.device, x_dtype)
    if backend == "reference":
        y = layer.added(x, active, layer.frozen)
        places = torch.tensor(
            [names.index(n) if n in names else -1 for n in (*active.names, "")], device="cpu"
        )
        owners, index = places.to(x.device)[active.owners()], [active.names.index(name) for name in names]
        return y - own_products(x, lora_a, lora_b, owners, active.scaling[index]).to(y.dtype)
    segments, scaling = active.subtracted(tuple(names))
    return layer.added(x, active, OwnBases(layer.frozen, lora_a, lora_b, segments, scaling, backend))


def _compute_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
