"""Kinds of adapters by name, and by PEFT's configs."""

from __future__ import annotations

from typing import Any

from .kind import AdapterKind
from .lora import Lora

_KINDS: dict[str, AdapterKind] = {"lora": Lora()}


def register_adapter_kind(kind: AdapterKind) -> None:
    """Makes a kind of adapter known. Of kinds that serve a config the one that was registered last has it.

    Args:
        kind: see `mlora_ext.adapters.kind.AdapterKind`.

    Raises:
        ValueError: another kind has its name.
    """
    if type(_KINDS.get(kind.name, kind)) is not type(kind):
        raise ValueError(f"adapter kind {kind.name!r}: there is a kind of this name; choose another one")
    _KINDS[kind.name] = kind


def adapter_kind(name: str) -> AdapterKind:
    """Returns the kind of a name."""
    return _KINDS[name]


def kind_for(name: str, config: Any) -> AdapterKind:
    """Returns the kind that an adapter with this config is of.

    Args:
        name: of the adapter, for messages.
        config: PEFT's.

    Raises:
        ValueError: no kind serves it.
    """
    for kind in reversed(_KINDS.values()):
        if kind.serves(config):
            return kind
    raise ValueError(f"adapter {name!r}: expected a peft.LoraConfig, got {type(config).__name__}")


def parameter_names() -> set[str]:
    """Returns the names of all kinds' Parameters."""
    return {name for kind in _KINDS.values() for name in kind.parameter_names}
