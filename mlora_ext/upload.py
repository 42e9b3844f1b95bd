"""Copies small tables to a device without waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def to_device(table: Tensor, device: torch.device) -> Tensor:
    """Returns a CPU tensor on a device; a copy to a GPU is queued on the current stream.

    Other streams do not wait for it: keep it with `once_per_stream`.

    Raises:
        RuntimeError: a CUDA graph is being captured, which would hold the copy and not make it.
    """
    if device.type != "cuda":
        return table.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a table cannot go to the GPU while a CUDA graph is captured; run a step before")
    return table.pin_memory().to(device, non_blocking=True)


def once_per_stream(
    kept: MutableMapping[Hashable, T], key: Hashable, device: torch.device, make: Callable[[], T]
) -> T:
    """Returns what is kept for a key and the device's current stream, made where it is missing.

    While a CUDA graph is captured, what another stream has serves too: a step ran before.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    place = (key, device, stream)
    if place not in kept:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            for other, value in kept.items():
                if isinstance(other, tuple) and other[:2] == place[:2]:
                    return value
        kept[place] = make()
    return kept[place]
