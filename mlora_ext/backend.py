"""Which implementation serves the operators: chosen by device, or explicitly with `use_backend`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch

Backend = Literal["reference", "cpu", "triton", "cuda"]
_DEFAULTS: dict[str, Backend] = {"cpu": "cpu", "cuda": "triton"}
_CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class _Choice:
    """What `use_backend` has chosen; a plain object, since torch.compile cannot trace a ContextVar."""

    name: Backend | None = None


_choice = _Choice()


@contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """Serve the operators with one backend inside the context, whatever the device; for all threads.

    Args:
        name: `reference` (plain PyTorch, any device and dtype), `cpu` (the compiled kernels), `triton` or
            `cuda` (not in this build).

    Raises:
        ValueError: if there is no such backend, or this build does not have it.

    Example:
        >>> with use_backend("reference"):
        ...     y = multi_lora_linear(x, weight, None, lora_a, lora_b, scaling, layout)
    """
    if name not in get_args(Backend):
        raise ValueError(f"backend: expected one of {', '.join(get_args(Backend))}, got {name!r}")
    if name in ("triton", "cuda"):
        raise ValueError(f"backend {name!r} is not available in this build; use 'cpu' or 'reference'")
    before, _choice.name = _choice.name, name
    try:
        yield
    finally:
        _choice.name = before


def backend_for(device: torch.device, dtype: torch.dtype) -> Backend:
    """The backend that serves tensors of this device and dtype.

    Raises:
        ValueError: if the backend cannot serve them; says why and what to do.
    """
    name = _choice.name or _DEFAULTS.get(device.type)
    if name == "reference":
        return name
    if name != "cpu" or device.type != "cpu":
        raise ValueError(
            f"no compiled backend for device {device.type!r} in this build; move the tensors to the CPU, "
            "or use mlora_ext.use_backend('reference')"
        )
    if dtype not in _CPU_DTYPES:
        raise ValueError(
            f"backend 'cpu' serves float32, bfloat16 and float16, x is {str(dtype).removeprefix('torch.')}; "
            "convert it, or use mlora_ext.use_backend('reference')"
        )
    return name
