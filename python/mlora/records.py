"""Frozen dataclasses that messages between stages may hold, as they hold tensors and plain values."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

_Kind = TypeVar("_Kind", bound=type)
_KINDS: dict[str, type] = {}


def record(kind: _Kind) -> _Kind:
    """Lets messages hold instances of a dataclass: `@record` above `@dataclass`."""
    assert is_dataclass(kind)
    assert kind.__name__ not in _KINDS
    _KINDS[kind.__name__] = kind
    return kind


def fields_of(value: object) -> tuple[str, dict[str, Any]] | None:
    """Returns a record's kind and its fields by name; None for anything else."""
    kind = _KINDS.get(type(value).__name__)
    if kind is not type(value) or not is_dataclass(kind):
        return None
    return kind.__name__, {field.name: getattr(value, field.name) for field in fields(kind)}


def made(kind: str, values: dict[str, Any]) -> Any:
    """Returns the record that `fields_of` took apart."""
    return _KINDS[kind](**values)
