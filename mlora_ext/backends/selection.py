"""Chooses the backend of the operators: by device, or as `use_backend` says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, get_args

import torch

from .gpu_base_gemm import DEFAULT, Library, serves

if TYPE_CHECKING:
    from .interface import GpuOperator

Backend = Literal["reference", "cpu", "triton", "cuda"]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class _Choice:
    """The backend that `use_backend` chose; a plain object, since torch.compile cannot trace a ContextVar."""

    name: Backend | None = None


_choice = _Choice()


def use_backend(name: Backend) -> AbstractContextManager[None]:
    """Serves the operators with one backend inside of `with`, on every device and in all threads.

    Args:
        name: `reference` (plain PyTorch, any device and dtype), `cpu` (the compiled kernels), `triton` (on a
            GPU; on CPU tensors in Triton's interpreter, with TRITON_INTERPRET=1) or `cuda` (the compiled
            CUDA kernels).

    Returns:
        The context manager.

    Raises:
        ValueError: there is no such backend, or this installation does not have it.

    Example:
        >>> with use_backend("reference"):
        ...     y = multi_lora_linear(x, weight, None, lora_a, lora_b, scaling, layout)
    """
    if name not in get_args(Backend):
        raise ValueError(f"backend: expected one of {', '.join(get_args(Backend))}, got {name!r}")
    if name in ("triton", "cuda"):
        gpu_operator(name)
    return _using(name)


@contextmanager
def _using(name: Backend) -> Iterator[None]:
    before, _choice.name = _choice.name, name
    try:
        yield
    finally:
        _choice.name = before


def chosen_backend() -> Backend | None:
    """Returns what `use_backend` chose; None outside of it."""
    return _choice.name


def save_dropout_masks(on: bool = True) -> None:
    """Sets whether forward on a GPU stores its dropout masks for backward, which then draws none.

    Results have the same bits. It costs T · D / 8 bytes for each layer between its two passes, for T rows of
    D columns. Only the backend `cuda` does so; the default is off.

    Args:
        on: whether to store them from now on.

    Raises:
        ValueError: this installation has no backend `cuda`.
    """
    if on or not _cuda_refusal():
        gpu_operator("cuda").saves_masks = on


def use_gpu_base_gemm(library: Library | None) -> None:
    """Sets who multiplies by plain frozen weights in 16 bits on an sm_90 GPU, from now on.

    A kernel of this library adds the low-rank part inside of the product. It sums in another order than
    cuBLAS, so results differ by rounding.

    Args:
        library: `cublas`; `mlora` (that kernel, where rows and weights begin at multiples of 16 bytes);
            `fastest` of both for each shape, measured at its first call; None: `cublas`, until the kernels
            of sm_90 have run on a GPU. But for `cublas`, backward reads dy with a kernel of sm_90, too.

    Raises:
        ValueError: there is no such library, or this installation or GPU does not have it.
    """
    if library not in (None, *get_args(Library)):
        raise ValueError(f"base_gemm: expected {', '.join(get_args(Library))} or None, got {library!r}")
    operator = gpu_operator("cuda")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if library == "mlora" and not serves(device):
        raise ValueError("base_gemm: 'mlora' needs a GPU of sm_90 and a build for it; take 'cublas'")
    operator.use_base_gemm(library or DEFAULT)  # type: ignore[attr-defined]


def backend_for(device: torch.device, dtype: torch.dtype) -> Backend:
    """Returns the backend of a layer: as `use_backend` says, else by device.

    That is `cpu` on a CPU; on a GPU `cuda`, or `triton` where this build has no CUDA kernels. ValueError says
    why no backend serves the device or dtype, and what to do.
    """
    name = _choice.name
    if name is None and device.type == "cpu" and dtype in _DTYPES:
        return "cpu"
    if name is None and device.type == "cuda":
        # A compiled graph calls the operator. Its kernel for CUDA tensors asks again when it runs.
        name = "cuda" if torch.compiler.is_compiling() else _on_a_gpu()
    elif name is None and device.type == "cpu":
        name = "cpu"
    if name == "reference":
        return name
    nowhere = f"no backend serves device {device.type!r}; move the tensors"
    reason = nowhere if name is None else _refusal(name, device)
    if reason is None and dtype not in _DTYPES:
        reason = (
            f"backend {name!r} serves float32, bfloat16 and float16, x is "
            f"{str(dtype).removeprefix('torch.')}; convert it"
        )
    if reason is not None:
        raise ValueError(f"{reason}, or use mlora_ext.use_backend('reference')")
    assert name is not None
    return name


@cache
def _on_a_gpu() -> Backend:
    """Returns the GPU backend that this installation and driver have; `cuda` if they have both."""
    return "triton" if _cuda_refusal() else "cuda"


def _cuda_refusal() -> str:
    """Returns why the CUDA kernels do not run here; empty if they do."""
    if _has_kernel("CUDA"):
        return torch.ops.mlora_ext.cuda_driver_refusal.default()  # type: ignore[no-any-return]
    return "" if _has_kernel("CPU") else "this build has no CUDA kernels; build it where nvcc is on PATH"


def _refusal(name: Backend, device: torch.device) -> str | None:
    """Returns why a backend does not serve a device, or None."""
    if device.type == ("cpu" if name == "cpu" else "cuda"):
        if name != "cpu" and not torch.compiler.is_compiling():
            gpu_operator(name)  # type: ignore[arg-type]
        return None
    if name == "cpu" or device.type != "cpu":
        return f"backend {name!r} does not serve device {device.type!r}; move the tensors"
    if torch.compiler.is_compiling():
        return f"torch.compile of CPU tensors needs backend 'cpu', not {name!r}; choose it with use_backend"
    if name == "triton":
        from .triton import INTERPRETED

        if not INTERPRETED:
            return (
                "backend 'triton' serves CPU tensors only in Triton's interpreter; move the tensors to a "
                "GPU, set TRITON_INTERPRET=1 before Python starts"
            )
        return None
    if not _has_kernel("CPU"):
        return "backend 'cuda' does not serve device 'cpu'; move the tensors to a GPU"
    return None


def _has_kernel(key: str) -> bool:
    """Whether the loaded libraries hold the CUDA kernels for tensors of this dispatch key."""
    return hasattr(torch.ops.mlora_ext, "cuda_forward") and torch._C._dispatch_has_kernel_for_dispatch_key(
        "mlora_ext::cuda_forward", key
    )


@cache
def gpu_operator(name: Literal["triton", "cuda"]) -> GpuOperator:
    """Returns a GPU backend's operator and loads its kernels; ValueError if this installation lacks it."""
    if name == "triton":
        try:
            from .triton import TritonOperator
        except ImportError as error:
            raise ValueError(
                f"backend 'triton' needs the package triton ({error}); install it, or use 'cuda', 'cpu' or "
                "'reference'"
            ) from error
        return TritonOperator()
    if reason := _cuda_refusal():
        raise ValueError(f"backend 'cuda': {reason}, or use 'triton', 'cpu' or 'reference'")
    from .cuda import CudaOperator

    return CudaOperator()
