"""The kind of a call: what decides how a model arranges its rows, as far as the arguments tell it.

Where samples lie in the layers' inputs is found once for each kind, see `samples`. A model may select or sort
rows by a mask, by labels, by lengths or by padding tokens. What was found with samples that such an argument
treats alike says nothing of samples that it treats differently, so the kind says which of the two holds.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

Call = tuple[tuple[Any, ...], dict[str, Any]]


def kind_of(call: Call, special: Tensor) -> tuple[Hashable, ...]:
    """Returns equal kinds for calls that take the same way through a model.

    Args:
        call: positional and keyword arguments.
        special: int64, tokens that a model may count or replace, such as padding.
    """
    args, kwargs = call
    flags: list[Tensor] = []
    named: list[tuple[str | int, Any]] = [*enumerate(args), *sorted(kwargs.items())]
    found = [(name, _kind(name, value, special, flags)) for name, value in named]
    read = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []  # one wait
    return (*found, *read)


def sizes_of(call: Call, batch: int) -> tuple[float, ...]:
    """Elements per sample of each tensor among the arguments, and 1, in the order of their names."""
    args, kwargs = call
    given = [*args, *(value for _, value in sorted(kwargs.items()))]
    return (1.0, *(value.numel() / batch for value in given if isinstance(value, Tensor)))


def _kind(name: str | int, value: Any, special: Tensor, flags: list[Tensor]) -> Hashable:
    if isinstance(value, Tensor):
        flags += _flags(str(name), value, special)
        return value.dim(), value.dtype
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return type(value), tuple(_kind(name, item, special, flags) for item in value)
    if isinstance(value, Mapping):
        return type(value), tuple((key, _kind(key, item, special, flags)) for key, item in value.items())
    return cast(Hashable, type(value))


def _flags(name: str, value: Tensor, special: Tensor) -> Iterator[Tensor]:
    """Bools that say whether a tensor treats all samples alike; none of tensors that hold plain numbers."""
    floating = value.is_floating_point() or value.is_complex()
    if value.dim() == 0 or value.numel() == 0 or value.is_meta or (floating and not _may_sort(name, value)):
        return
    yield (value == value[:1]).all()
    if value.dim() > 1:
        counted = torch.zeros(1, dtype=torch.int64) if floating else special
        counts = (value.flatten(1).unsqueeze(-1) == counted.to(value.device)).sum(1)
        yield (counts == counts[:1]).all()
        yield (value != 0).all()


def _may_sort(name: str, value: Tensor) -> bool:
    return value.dim() == 1 or "mask" in name
