"""What a run trains with, for its report: versions of packages, and the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mlora.store.run_folder import RunFolder

PACKAGES = ("mlora-ext", "torch", "transformers", "peft", "tokenizers", "safetensors", "numpy")


def note_start(folder: RunFolder, device: torch.device, iteration: int, warnings: Sequence[str]) -> None:
    """Adds the start or resume of a run, by this process and now, to ``environment.json``."""
    start = {
        "began": datetime.now(UTC).replace(microsecond=0),
        "iteration": iteration,
        "versions": _versions(),
        "machine": _machine(device),
        "warnings": list(warnings),
    }
    folder.add_start(start)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def _machine(device: torch.device) -> dict[str, Any]:
    """Returns what the machine of stage 0 is; sizes in bytes."""
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["gpu_bytes"] = torch.cuda.get_device_properties(device).total_memory
    return found


def processor() -> str:
    """Returns the processor's name; Linux has it in a file."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
