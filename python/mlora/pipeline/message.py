"""Messages between neighbouring stages: a small header of plain values, and tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .envelope import is_small


class MessageType(StrEnum):
    """The kinds of messages."""

    FORWARD = "forward"
    BACKWARD = "backward"
    CONTROL = "control"
    REPLY = "reply"
    END = "end"
    FAULT = "fault"


@dataclass(eq=False)
class Message:
    """One message. Its content must not change, because properties are cached.

    Attributes:
        content: plain values, lists, dictionaries and tensors.
        ready: recorded on a GPU once the tensors are computed or have arrived.
    """

    sort: MessageType
    content: dict[str, Any] = field(default_factory=dict)
    ready: torch.cuda.Event | None = None

    @property
    def number(self) -> int:
        """The micro-batch's number, or -1."""
        return int(self.content.get("number", -1))

    @cached_property
    def flat(self) -> tuple[Any, list[Tensor]]:
        """The content with tensors replaced by marks, and the tensors; TypeError for other values."""
        tensors: list[Tensor] = []
        return _flatten(self.content, tensors), tensors

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the content, in the order of `encode`."""
        return self.flat[1]

    @cached_property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Shape:
    """A header's entry for a tensor. A `small` tensor is inside the envelope, others follow it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    small: bool


class Header(NamedTuple):
    """A message without its tensors; `tree` is the content with marks in place of tensors."""

    sort: MessageType
    tree: Any
    shapes: list[Shape]

    @classmethod
    def of(cls, encoded: bytes) -> Header:
        """Parses the output of `encode`."""
        sort, tree, shapes = json.loads(encoded)
        return cls(
            MessageType(sort),
            tree,
            [Shape(tuple(size), _DTYPES[name], small) for name, small, *size in shapes],
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_DTYPES = {
    _name(dtype): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MARK = "tensor:"


def encode(message: Message) -> tuple[bytes, list[Tensor]]:
    """Splits a message into a header, JSON in UTF-8, and the tensors that it mentions, in order."""
    tree, tensors = message.flat
    shapes = [[_NAMES[t.dtype], is_small(t), *t.shape] for t in tensors]
    return json.dumps([message.sort, tree, shapes], separators=(",", ":")).encode(), tensors


def decode(header: Header, tensors: Sequence[Tensor]) -> Message:
    """Rebuilds a message; tuples come back as lists."""
    return Message(header.sort, _unflatten(header.tree, tensors))


def map_tensors(message: Message, change: Callable[[Tensor], Tensor]) -> Message:
    """Returns a copy of a message with `change` applied to each tensor."""
    tree, tensors = message.flat
    return Message(message.sort, _unflatten(tree, [change(tensor) for tensor in tensors]))


def _flatten(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        if value.dtype not in _NAMES:
            raise TypeError(f"message: expected a tensor of {', '.join(_DTYPES)}, got {_name(value.dtype)}")
        tensors.append(value)
        return f"{_MARK}{len(tensors) - 1}"
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"message: expected keys that are text, got {key!r}")
        return {key: _flatten(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_flatten(item, tensors) for item in value]
    if isinstance(value, str):
        return f"text:{value}" if value.startswith((_MARK, "text:")) else value
    if value is None or isinstance(value, bool | int | float):
        return value
    raise TypeError(f"message: expected plain values and tensors, got {type(value).__name__}")


def _unflatten(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, str):
        if value.startswith(_MARK):
            return tensors[int(value.removeprefix(_MARK))]
        return value.removeprefix("text:")
    if isinstance(value, dict):
        return {key: _unflatten(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_unflatten(item, tensors) for item in value]
    return value
