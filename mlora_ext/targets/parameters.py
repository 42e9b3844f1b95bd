"""Finds the parameters that an adapter sits on, by PEFT's rules for `target_parameters`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from ..adapters.lora_config import init_kind
from ..adapters.registry import kind_for
from ..errors import AdapterError
from ..layers.experts import MultiLoRAExperts, MultiLoRAGivenRows
from ..layers.linear import MultiLoRALinear
from ..layers.matrix import MultiLoRAMatrix
from ..layers.parameter_layer import ParameterLayer
from ..layers.plain_linear import is_transposed

if TYPE_CHECKING:
    from peft import LoraConfig

_KINDS: tuple[type[ParameterLayer], ...] = (MultiLoRAGivenRows, MultiLoRAExperts, MultiLoRAMatrix)


def target_parameters(config: LoraConfig, modules: Iterable[tuple[str, nn.Module]]) -> dict[str, list[str]]:
    """Returns the names of targeted parameters of each module that has some, in the model's order.

    PEFT targets a parameter if its full name is given, or a last part of it after a dot.

    Args:
        config: as `peft.utils.transformers_weight_conversion` has translated it.
        modules: of the base, by name.
    """
    wanted = set(config.target_parameters or ())
    found: dict[str, list[str]] = {}
    for key, module in modules if wanted else ():
        for name, _ in module.named_parameters(recurse=False):
            full = f"{key}.{name}"
            if full in wanted or any(full.endswith(f".{one}") for one in wanted):
                found.setdefault(key, []).append(name)
    return found


def near_parameters(names: Iterable[str], modules: Iterable[tuple[str, nn.Module]]) -> str:
    """Returns the end of a message about names that match no parameter: those that are spelt most alike.

    A name is compared with as many last parts of each parameter's name as it has; empty if none is similar.
    """
    full = [f"{key}.{name}" for key, module in modules for name, _ in module.named_parameters(recurse=False)]
    near: dict[str, None] = {}
    for name in names:
        parts = name.count(".") + 1
        ends = dict.fromkeys(".".join(one.split(".")[-parts:]) for one in full)
        near |= dict.fromkeys(difflib.get_close_matches(name, list(ends), n=1))
    return f"; did you mean {', '.join(map(repr, near))}?" if near else ""


def in_order(module: nn.Module, names: list[str]) -> list[str]:
    """Returns the names of targeted parameters in the order in which PEFT wraps them in a new model."""
    kind = next((one for one in _KINDS if one.serves(module)), None)
    return names if kind is None else [one for one in kind.candidates(module) if one in names]


def check_parameters(name: str, config: LoraConfig, key: str, module: nn.Module, names: list[str]) -> None:
    """Raises ValueError for targeted parameters of a module that cannot have adapters."""
    what = f"target_parameters: {key}.{names[0]}"
    for field in ("lora_dropout", "fan_in_fan_out", "lora_bias", "use_dora"):
        if getattr(config, field):
            raise AdapterError(
                name,
                f"{what} is a parameter, for which PEFT serves no {field}; leave {field}="
                f"{getattr(config, field)!r} out, or target modules outside of the experts only",
            )
    if is_weight(module, names):
        return
    adapters = kind_for(name, config)
    if not adapters.is_plain:
        raise AdapterError(
            name, f"{what}: adapters of kind {adapters.name!r} can be put on linear layers only"
        )
    if init_kind(config) == "orthogonal":
        raise AdapterError(
            name,
            f"{what} is a parameter, on which init_lora_weights='orthogonal' is not supported; use True or "
            "'gaussian'",
        )
    kind = next((one for one in _KINDS if one.serves(module)), None)
    if kind is None:
        raise AdapterError(name, f"{what} belongs to a {type(module).__name__}, which is not supported")
    able = kind.candidates(module)
    others = [parameter for parameter in names if parameter not in able]
    if others:
        raise AdapterError(
            name,
            f"target_parameters: {key}.{others[0]} is not supported; in a "
            f"{type(module).__name__} adapters can be put on {' and '.join(able)}",
        )


def is_weight(module: nn.Module, names: list[str]) -> bool:
    """Whether the parameter is a linear layer's weight: the same as targeting the layer."""
    return MultiLoRALinear.serves(module) and names == ["weight"] and not is_transposed(module)
