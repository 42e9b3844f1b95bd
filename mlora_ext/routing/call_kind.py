"""The kind of a call: everything in its arguments that may decide how a model arranges its rows.

`samples` finds once per kind where samples lie in the layers' inputs. A model may select or sort rows by a
mask, by labels, by lengths or by padding tokens. A result found while such an argument treats all samples
alike may not hold when it treats them differently. So the kind says which is the case.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Call = tuple[tuple[Any, ...], dict[str, Any]]


def kind_of(call: Call, contents: Sequence[Tensor], special: Tensor) -> tuple[Hashable, ...]:
    """Returns a key that is equal for calls that take the same way through a model.

    `contents` are the tensors among the arguments that hold the samples. `special` holds int64 tokens that a
    model may count or replace, such as padding.
    """
    args, kwargs = call
    flags: list[Tensor] = []

    def kind(name: str | int, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            held = any(value is content for content in contents)
            flags.extend(_of_tokens(value, special) if held else _flags(str(name), value))
            images = tuple(size == 1 for size in value.shape[1:-3])
            # If B = S, shapes do not show that a model orders rows differently for some lengths.
            alike = held and value.shape[0] in value.shape[1:]
            return value.dim(), value.dtype, images, tuple(value.shape) if alike else ()
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple):
            return type(value).__name__, tuple(kind(name, item) for item in value)
        if isinstance(value, Mapping):
            return type(value).__name__, tuple((key, kind(key, item)) for key, item in value.items())
        return type(value).__name__

    named: list[tuple[str | int, Any]] = [*enumerate(args), *sorted(kwargs.items())]
    found = [(name, kind(name, value)) for name, value in named]
    read = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []  # one sync
    return (*found, *read)


def sizes_of(call: Call, batch: int) -> tuple[float, ...]:
    """Returns 1 and each argument tensor's elements per sample: positional ones, then others by name."""
    args, kwargs = call
    given = [*args, *(value for _, value in sorted(kwargs.items()))]
    return (1.0, *(value.numel() / batch for value in given if isinstance(value, Tensor)))


def _of_tokens(value: Tensor, special: Tensor) -> Iterator[Tensor]:
    """Yields whether each special token occurs equally often in all samples."""
    if value.is_floating_point() or value.dim() < 2 or value.is_meta or not special.numel():
        return
    counts = torch.stack([(value == token).flatten(1).sum(1) for token in special.tolist()])
    yield (counts == counts[:, :1]).all()


def _flags(name: str, value: Tensor) -> Iterator[Tensor]:
    """Yields whether another argument treats all samples alike; nothing for scalars and float data."""
    sorts = value.dim() == 1 or "mask" in name
    if value.dim() == 0 or not value.numel() or value.is_meta or (value.is_floating_point() and not sorts):
        return
    yield (value == value[:1]).all()
    if value.dim() > 1:
        for counted in (0, -100):
            counts = (value == counted).flatten(1).sum(1)
            yield (counts == counts[:1]).all()
            yield (counts == 0).all()
