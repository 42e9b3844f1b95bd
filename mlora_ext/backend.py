"""Which implementation serves the operators: chosen by device, or explicitly with `use_backend`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, get_args

import torch

if TYPE_CHECKING:
    from .gpu.operator import GpuOperator

Backend = Literal["reference", "cpu", "triton", "cuda"]
_DEFAULTS: dict[str, Backend] = {"cpu": "cpu", "cuda": "triton"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class _Choice:
    """What `use_backend` has chosen; a plain object, since torch.compile cannot trace a ContextVar."""

    name: Backend | None = None


_choice = _Choice()


@contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """Serve the operators with one backend inside the context, whatever the device; for all threads.

    Args:
        name: `reference` (plain PyTorch, any device and dtype), `cpu` (the compiled kernels), `triton` (on a
            GPU; on CPU tensors in Triton's interpreter, with TRITON_INTERPRET=1) or `cuda` (the compiled
            CUDA kernels).

    Raises:
        ValueError: if there is no such backend, or this installation does not have it.

    Example:
        >>> with use_backend("reference"):
        ...     y = multi_lora_linear(x, weight, None, lora_a, lora_b, scaling, layout)
    """
    if name not in get_args(Backend):
        raise ValueError(f"backend: expected one of {', '.join(get_args(Backend))}, got {name!r}")
    if name in ("triton", "cuda"):
        gpu_operator(name)
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
    reason = f"no backend serves device {device.type!r}" if name is None else _refusal(name, device)
    if reason is None and dtype not in _DTYPES:
        reason = (
            f"backend {name!r} serves float32, bfloat16 and float16, x is "
            f"{str(dtype).removeprefix('torch.')}; convert it"
        )
    if reason is not None:
        raise ValueError(f"{reason}, or use mlora_ext.use_backend('reference')")
    assert name is not None
    return name


def _refusal(name: Backend, device: torch.device) -> str | None:
    """Why a backend does not serve a device, or None."""
    if device.type == ("cpu" if name == "cpu" else "cuda"):
        if name != "cpu" and not torch.compiler.is_compiling():
            gpu_operator(name)  # type: ignore[arg-type]
        return None
    if name == "cpu" or device.type != "cpu":
        return f"backend {name!r} does not serve device {device.type!r}; move the tensors"
    if torch.compiler.is_compiling():
        return f"torch.compile of CPU tensors uses backend 'cpu', not {name!r}"
    if name == "triton":
        from .triton import INTERPRETED

        if not INTERPRETED:
            return (
                "backend 'triton' serves CPU tensors in Triton's interpreter only: set TRITON_INTERPRET=1 "
                "before Python starts, move the tensors to a GPU"
            )
        return None
    if not _has_kernel("CPU"):
        return "backend 'cuda' does not serve device 'cpu'; move the tensors to a GPU"
    return None


def _has_kernel(key: str) -> bool:
    """Whether the loaded libraries hold the CUDA kernels for tensors of a dispatch key."""
    return hasattr(torch.ops.mlora_ext, "cuda_shrink") and torch._C._dispatch_has_kernel_for_dispatch_key(
        "mlora_ext::cuda_shrink", key
    )


@cache
def gpu_operator(name: Literal["triton", "cuda"]) -> GpuOperator:
    """The operator of a GPU backend; its kernels are loaded now.

    Raises:
        ValueError: if this installation does not have the backend.
    """
    from .gpu.operator import GpuOperator

    if name == "triton":
        try:
            from .triton import Kernels
        except ImportError as error:
            raise ValueError(
                f"backend 'triton' needs the package triton ({error}); install it, or use 'cuda', 'cpu' or "
                "'reference'"
            ) from error
        return GpuOperator(Kernels())
    if not (_has_kernel("CUDA") or _has_kernel("CPU")):
        raise ValueError(
            "backend 'cuda': this build has no CUDA kernels; build it where nvcc is on PATH, or use "
            "'triton', 'cpu' or 'reference'"
        )
    from .gpu.cuda import CudaKernels

    return GpuOperator(CudaKernels())
