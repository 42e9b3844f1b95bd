"""Which family of quantised weights a linear layer belongs to, without importing the libraries."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch
from torch import Tensor, nn

from ..weight import FrozenWeight
from . import awq, bnb_4bit, bnb_int8, gptq, torchao
from .blocks import QuantizedWeight

Family = Literal["bnb-4bit", "bnb-int8", "gptq", "awq", "torchao"]
_LAYERS: dict[tuple[str, str], Family] = {
    ("bitsandbytes", "Linear4bit"): "bnb-4bit",
    ("bitsandbytes", "Linear8bitLt"): "bnb-int8",
    ("gptqmodel", "AWQuantLinear"): "awq",
    ("gptqmodel", "BaseQuantLinear"): "gptq",
}
"""Classes of layers by package and name; the most derived one counts."""
_FILES: dict[Family, ModuleType] = {
    "bnb-4bit": bnb_4bit,
    "bnb-int8": bnb_int8,
    "gptq": gptq,
    "awq": awq,
    "torchao": torchao,
}


def family_of(module: nn.Module) -> Family | None:
    """Returns the family of a linear layer's weight, or None for all other modules.

    A layer without numbers, as a stage has of other stages, counts as not quantised.
    """
    weight, family = held_numbers(module), _library_family(module)
    if family is not None:
        return None if weight is not None and weight.is_meta else family
    if type(module) is not nn.Linear or weight is None:
        return None
    return "torchao" if type(weight.data).__module__.startswith("torchao.") else None


def is_library_layer(module: nn.Module) -> bool:
    """Whether a module is a linear layer of bitsandbytes or gptqmodel, with or without numbers."""
    return _library_family(module) is not None


def is_gptqmodel(module: nn.Module) -> bool:
    """Whether a module is a linear layer of gptqmodel, whose W is in buffers, with or without numbers."""
    return _library_family(module) in ("gptq", "awq")


def _library_family(module: nn.Module) -> Family | None:
    for kind in type(module).__mro__:
        family = _LAYERS.get((kind.__module__.partition(".")[0], kind.__name__))
        if family is not None:
            return family
    return None


def is_quantized(module: nn.Module) -> bool:
    """Whether a linear layer, converted or not, has a quantised weight with numbers."""
    return family_of(module) is not None or isinstance(getattr(module, "frozen", None), QuantizedWeight)


def is_awq(module: nn.Module) -> bool:
    """Whether a linear layer, converted or not, has a weight that AWQ quantised."""
    return family_of(module) == "awq" or isinstance(getattr(module, "frozen", None), awq.AwqWeight)


def held_numbers(module: nn.Module) -> Tensor | None:
    """Returns the tensor with a linear layer's numbers, quantised or not; None if it has none."""
    found = module._parameters.get("weight")
    return module._buffers.get("qweight") if found is None else found


def fault_of(module: nn.Module) -> str | None:
    """Returns why a quantised layer cannot be taken over; None if it can, or if it is not quantised."""
    family = family_of(module)
    found: str | None = _FILES[family].fault(module) if family else None
    return found


def stand_in(module: nn.Module, dtype: torch.dtype) -> nn.Parameter:
    """Returns a weight `[O, D]` of one number, for shape, dtype and device; meta stays meta."""
    numbers, shape = held_numbers(module), (module.out_features, module.in_features)
    assert numbers is not None
    number = torch.zeros((), dtype=dtype, device=numbers.device)
    return nn.Parameter(number.expand(shape), requires_grad=False)  # type: ignore[arg-type]


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
    if family == "gptq":
        return gptq.GptqWeight(layer, source, dtype)
    if family == "awq":
        return awq.AwqWeight(layer, source, dtype)
    return torchao.TorchaoWeight(layer)


def base_weight(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """Returns the weight of a linear layer, or the one that says its W's shape, dtype and device."""
    if is_library_layer(module):
        return stand_in(module, dtype)
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def base_bias(module: nn.Module, dtype: torch.dtype) -> nn.Parameter | None:
    """Returns the bias of a linear layer; gptqmodel's buffer in fp16 becomes a Parameter of this dtype."""
    bias: Tensor | None = getattr(module, "bias", None)
    if bias is None or isinstance(bias, nn.Parameter):
        return bias
    return nn.Parameter(bias.detach().to(dtype), requires_grad=False)
