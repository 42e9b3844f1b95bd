"""The kinds of frozen weights, by name."""

from __future__ import annotations

from .packed import PackedWeight
from .plain import PlainWeight
from .weight import FrozenKind

_KINDS: dict[str, FrozenKind] = {"plain": PlainWeight, "packed": PackedWeight}


def register_frozen_weight(name: str, kind: FrozenKind) -> None:
    """Registers a kind of frozen weight, for `set_frozen_weights` and `Engine(frozen_weight=...)`.

    Args:
        name: a name that is not taken.
        kind: makes the frozen weight of a layer; see `mlora_ext.frozen.weight.FrozenWeight`.

    Raises:
        ValueError: another kind has this name.
    """
    if _KINDS.get(name, kind) is not kind:
        raise ValueError(f"frozen weight {name!r}: this name is taken; choose another one")
    _KINDS[name] = kind


def frozen_kind(name: str) -> FrozenKind:
    """Returns the kind with this name.

    Raises:
        ValueError: no kind has this name.
    """
    if name not in _KINDS:
        raise ValueError(f"frozen weight: expected one of {', '.join(_KINDS)}, got {name!r}")
    return _KINDS[name]
