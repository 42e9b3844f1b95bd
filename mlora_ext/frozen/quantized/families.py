"""Which family of quantised weights a linear layer belongs to, without importing the libraries."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch
from torch import Tensor, nn

from ..weight import FrozenWeight
from . import bnb_4bit, bnb_int8, torchao
from .blocks import QuantizedWeight

Family = Literal["bnb-4bit", "bnb-int8", "torchao"]
_LAYERS: dict[str, Family] = {"Linear4bit": "bnb-4bit", "Linear8bitLt": "bnb-int8"}
_FILES: dict[Family, ModuleType] = {"bnb-4bit": bnb_4bit, "bnb-int8": bnb_int8, "torchao": torchao}


def family_of(module: nn.Module) -> Family | None:
    """Returns the family of a linear layer's weight, or None for all other modules.

    A layer without numbers, as a stage has of other stages, counts as not quantised.
    """
    weight = module._parameters.get("weight")
    if not isinstance(module, nn.Linear) or weight is None:
        return None
    for kind in type(module).__mro__:
        if kind.__module__.startswith("bitsandbytes.") and kind.__name__ in _LAYERS:
            return None if weight.is_meta else _LAYERS[kind.__name__]
    data = type(weight.data)
    return "torchao" if data.__module__.startswith("torchao.") and type(module) is nn.Linear else None


def is_quantized(module: nn.Module) -> bool:
    """Whether a linear layer, converted or not, has a quantised weight with numbers."""
    return family_of(module) is not None or isinstance(getattr(module, "frozen", None), QuantizedWeight)


def is_bitsandbytes(module: nn.Module) -> bool:
    """Whether a module is one of bitsandbytes' linear layers, with or without numbers."""
    names = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("bitsandbytes.")}
    return isinstance(module, nn.Linear) and not names.isdisjoint(_LAYERS)


def fault_of(module: nn.Module) -> str | None:
    """Returns why a quantised layer cannot be taken over; None if it can, or if it is not quantised."""
    family = family_of(module)
    found: str | None = _FILES[family].fault(module) if family else None
    return found


def stand_in(module: nn.Linear, dtype: torch.dtype) -> nn.Parameter:
    """Returns a weight `[O, D]` of one number, for shape, dtype and device; meta stays meta."""
    device = module.weight.device
    number = torch.zeros((), dtype=dtype, device=device)
    return nn.Parameter(number.expand(module.out_features, module.in_features), requires_grad=False)


def frozen_weight_of(source: nn.Module, layer: nn.Module, dtype: torch.dtype) -> FrozenWeight:
    """Returns the weight of a quantised layer for the layer that replaces it, and moves its tensors there.

    Args:
        source: of a family; `fault_of` has found nothing.
        layer: has a parameter `weight`: torchao's own, or a stand-in.
        dtype: of x.
    """
    family = family_of(source)
    if family == "bnb-4bit":
        return bnb_4bit.Bnb4bitWeight(layer, source)
    if family == "bnb-int8":
        return bnb_int8.BnbInt8Weight(layer, source, dtype)
    return torchao.TorchaoWeight(layer)


def base_weight(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """Returns the weight of a linear layer, or the one that says its W's shape, dtype and device."""
    if is_bitsandbytes(module):
        assert isinstance(module, nn.Linear)
        return stand_in(module, dtype)
    weight = module._parameters["weight"]
    assert weight is not None
    return weight
