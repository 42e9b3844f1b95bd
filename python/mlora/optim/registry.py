"""Optimizers by their names in a config. Imports no torch, so that a config can be read without it.

To add an optimizer, subclass `mlora.optim.optimizer.Optimizer` and register the class.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

Kind = type[Any]
"""A subclass of `mlora.optim.optimizer.Optimizer`."""

_OPTIMIZERS: dict[str, str | Kind] = {
    "adamw_torch": "mlora.optim.adamw:AdamW",
    "adamw_torch_fused": "mlora.optim.adamw:FusedAdamW",
    "sgd": "mlora.optim.sgd:Sgd",
}


def register_optimizer(name: str, kind: Kind) -> None:
    """Registers an optimizer under a name for the key `optim`.

    Args:
        name: a name that is not taken.
        kind: the class.

    Raises:
        ValueError: another optimizer has this name.
    """
    if _OPTIMIZERS.get(name, kind) is not kind:
        raise ValueError(f"optim: the name {name!r} is taken; choose another one")
    _OPTIMIZERS[name] = kind


def optimizer_names() -> list[str]:
    """Returns the names of all optimizers."""
    return list(_OPTIMIZERS)


def optimizer_kind(name: str) -> Kind:
    """Returns the class of the optimizer with this name.

    Raises:
        ValueError: no optimizer has this name.
    """
    if name not in _OPTIMIZERS:
        raise ValueError(f"optim: expected one of {', '.join(_OPTIMIZERS)}, got {name!r}")
    found = _OPTIMIZERS[name]
    if isinstance(found, str):
        found = _OPTIMIZERS[name] = resolve_name(found)
    return found
