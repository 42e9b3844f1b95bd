"""The kinds of adapters, by name and by PEFT config."""

from __future__ import annotations

from typing import Any

from ..errors import AdapterError
from .kind import AdapterKind
from .lora import Dora, LessStart, Lora, LoraBias

_KINDS: dict[str, AdapterKind] = {kind.name: kind for kind in (Lora(), LoraBias(), Dora(), LessStart())}


def register_adapter_kind(kind: AdapterKind) -> None:
    """Registers a kind of adapter. If several kinds serve a config, the one registered last is used.

    Args:
        kind: see `mlora_ext.adapters.kind.AdapterKind`.

    Raises:
        ValueError: another kind has this name.
    """
    if type(_KINDS.get(kind.name, kind)) is not type(kind):
        raise ValueError(f"adapter kind {kind.name!r}: this name is taken; choose another one")
    _KINDS[kind.name] = kind


def adapter_kind(name: str) -> AdapterKind:
    """Returns the kind with this name.

    Raises:
        ValueError: no kind has this name.
    """
    if name not in _KINDS:
        raise ValueError(f"adapter kind: expected one of {', '.join(_KINDS)}, got {name!r}")
    return _KINDS[name]


def kind_for(name: str, config: Any) -> AdapterKind:
    """Returns the kind of an adapter with this config.

    Args:
        name: the adapter's name, for messages.
        config: the adapter's PEFT config.

    Raises:
        ValueError: no kind serves the config.
    """
    for kind in reversed(_KINDS.values()):
        if kind.serves(config):
            return kind
    raise AdapterError(name, f"expected a peft.LoraConfig, got {type(config).__name__}")


def parameters_by_key() -> dict[str, str]:
    """Returns the name of a Parameter by what follows the layer's name in PEFT's files, for all kinds."""
    return {kind.peft_key(name): name for kind in _KINDS.values() for name in kind.parameter_names}
