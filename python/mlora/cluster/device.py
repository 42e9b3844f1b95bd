"""Where a run computes, and whether the operators of this build serve it there."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from mlora.cluster.malloc import give_back_freed_memory, keep_freed_memory
from mlora.cluster.onednn_caches import bound_caches
from mlora.config.run_config import RunConfig
from mlora.errors import RunError, first_line


def choose_device(device: str | None, dtype: torch.dtype) -> str:
    """Return the device to compute on, before anything is loaded to it.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:<index>``; none is CUDA where there is one, else the CPU.
        dtype: of the base model.

    Returns:
        The device.

    Raises:
        RunError: the device is not there, the compiled operators are missing or cannot be loaded, or they do
            not serve the device or the dtype.
    """
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(chosen)
    except RuntimeError as error:
        raise RunError(f"device: must be cpu, cuda or cuda:<index>, got {chosen!r}") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise RunError(f"device: {chosen} is not there; this torch sees no CUDA device")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise RunError(f"device: {chosen} is not there; this machine has {count} CUDA devices")
    load_operators()
    from mlora_ext.backends.selection import backend_for
    from mlora_ext.ops.library import check_library

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


def dtype_of(config: RunConfig) -> torch.dtype:
    """Return the dtype of a run's base model."""
    return torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else torch.float32


def set_malloc(config: RunConfig) -> None:
    """Tell libraries how to hold a run's memory on a CPU: fast, or, under a limit, as little as can be.

    Args:
        config: the run's.
    """
    bound_caches()
    if config.scheduler.memory_limit is None:
        keep_freed_memory()
    else:
        give_back_freed_memory()


def limit_allocator(config: RunConfig, device: torch.device) -> None:
    """Let PyTorch's allocator of a GPU take no more than a run's limit: what exceeds it is an error here, not
    in another process. It gives back what lies free before, and is bounded until the process ends.

    Args:
        config: the run's; nothing changes where it has no limit.
        device: a GPU.

    Raises:
        RunError: the process uses another allocator, of which nobody can know what it holds.
    """
    limit = config.scheduler.limit_bytes
    if limit is None:
        return
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise RunError(
            f"scheduler.memory_limit: needs PyTorch's own allocator, this process uses {backend}; unset "
            "PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    total = torch.cuda.mem_get_info(index)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), index)


def kind_of(device: torch.device) -> str:
    """Name what equally fast devices have in common: the GPU's model, or the processor's and this process's
    number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.processor()}, {torch.get_num_threads()} threads"


def own_device(device: str | None, dtype: torch.dtype, local_rank: int) -> str:
    """Return the device of one of several processes of a machine, as :func:`choose_device`.

    Args:
        device: ``cuda`` gives each process a GPU in turn; the others are taken as they are.
        dtype: of the base model.
        local_rank: the process's number on its machine.

    Raises:
        RunError: as :func:`choose_device`.
    """
    chosen = choose_device(device, dtype)
    return f"cuda:{local_rank % torch.cuda.device_count()}" if chosen == "cuda" else chosen


def load_operators() -> None:
    """Import the operators, which loads their compiled library where there is one.

    Raises:
        RunError: the library is there, but cannot be loaded, for example into another torch.
    """
    try:
        import mlora_ext  # noqa: F401
    except OSError as error:
        raise RunError(
            f"the compiled operators cannot be loaded: {first_line(error)}; build them anew for this torch "
            "with `pip install --no-build-isolation .` or `make env` in the source folder"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether memory ran out, for which torch's allocator on the CPU has no type of its own.

    Args:
        error: any.
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
