"""The device that a run computes on, and whether the operators of this build support it."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from mlora.cluster.allocators import bound_caches, give_back_freed_memory, keep_freed_memory
from mlora.config.run_config import RunConfig
from mlora.errors import NamedRunError, RunError, first_line


def choose_device(device: str | None, dtype: torch.dtype) -> str:
    """Returns the device to compute on, before anything is loaded to it.

    Args:
        device: `cpu`, `cuda` or `cuda:<index>`; None = CUDA if there is one, else the CPU.
        dtype: the base model's.

    Raises:
        RunError: the device does not exist, the compiled operators are missing or cannot be loaded, or they
            do not support the device or the dtype.
    """
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    place = existing_device(chosen)
    load_operators()
    from mlora_ext.backends.selection import backend_for
    from mlora_ext.library import check_library

    try:
        if backend_for(place, dtype) == "cpu":
            check_library()
    except ValueError as error:
        reason = first_line(error).partition(";")[0]
        default = "" if device else ", the default because this torch sees CUDA"
        instead = "" if place.type == "cpu" else "; set device: cpu (generate: --device cpu)"
        raise RunError(f"device: {chosen}{default}: {reason}{instead}") from error
    except RuntimeError as error:
        raise RunError(first_line(error)) from error
    return chosen


def existing_device(device: str | torch.device) -> torch.device:
    """Returns a device by its name. Raises RunError if that is none, or if the machine lacks the device."""
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise RunError(f"device: must be cpu, cuda or cuda:<index>, got {device!r}") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise RunError(f"device: {device} is not there; this torch sees no CUDA device")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise RunError(f"device: {device} is not there; this machine has {count} CUDA devices")
    return place


def dtype_of(config: RunConfig) -> torch.dtype:
    """Returns the dtype of a run's base model."""
    return torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else torch.float32


def set_allocators(limit: int | None, device: torch.device) -> None:
    """Sets, until the process ends, how it holds memory of a device: fast, or under a limit in bytes.

    On a CPU, libraries then hold as little as possible. On a GPU, an allocation beyond the limit fails in
    this process, not in another one; before that, PyTorch's allocator gives back its unused blocks. Raises
    RunError if the process uses another allocator: nobody knows how much that one holds.
    """
    if device.type == "cpu":
        bound_caches()
        if limit is None:
            keep_freed_memory()
        else:
            give_back_freed_memory()
    elif limit is not None:
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            raise NamedRunError(
                "memory_limit",
                f"needs PyTorch's own allocator, this process uses {backend}; unset "
                "PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF",
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        total = torch.cuda.mem_get_info(index)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), index)


def kind_of(device: torch.device) -> str:
    """Names what equally fast devices share: the GPU's model, or the processor's and the thread count."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.processor()}, {torch.get_num_threads()} threads"


def load_operators() -> None:
    """Imports the operators and loads their compiled library if there is one.
    Raises RunError if the library is there but cannot be loaded, for example into another torch."""
    try:
        import mlora_ext  # noqa: F401
    except OSError as error:
        raise RunError(
            f"the compiled operators cannot be loaded: {first_line(error)}; build them anew for this torch "
            "with `make env` or `pip install --no-build-isolation -e .` in the source folder"
        ) from error
