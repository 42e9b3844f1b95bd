"""Kinds of frozen weights by name."""

from __future__ import annotations

from .packed import PackedWeight
from .plain import PlainWeight
from .weight import FrozenKind

_KINDS: dict[str, FrozenKind] = {"plain": PlainWeight, "packed": PackedWeight}


def register_frozen_weight(name: str, kind: FrozenKind) -> None:
    """Gives a kind of frozen weight a name, under which `set_frozen_weights` and an engine find it.

    Args:
        name: of the kind; not taken.
        kind: makes the weight of a layer; see `mlora_ext.frozen.weight.FrozenWeight`.

    Raises:
        ValueError: the name is taken by another kind.
    """
    if _KINDS.get(name, kind) is not kind:
        raise ValueError(f"frozen weight {name!r}: there is a kind of this name; choose another one")
    _KINDS[name] = kind


def frozen_kind(name: str) -> FrozenKind:
    """Returns the kind of a name.

    Raises:
        ValueError: there is none.
    """
    if name not in _KINDS:
        raise ValueError(f"frozen weight: expected one of {', '.join(_KINDS)}, got {name!r}")
    return _KINDS[name]
