"""The machine that a result was measured on, and what else ran there."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from shared.results import dtype_name

CHECKOUT = Path(__file__).resolve().parents[2]
BENCH = (sys.executable, str(CHECKOUT / "bench" / "__main__.py"))
"""Begins the command of a benchmark in a process of its own."""


def describe(command: str | None = None, commit: str | None = None) -> dict[str, Any]:
    """The machine and the software that a result was measured with.

    Args:
        command: what was run; default: of this process.
        commit: of a source folder that is no git checkout; default: what git says.
    """
    import mlora_ext  # noqa: F401  (loads the operators that name their instruction set)
    from mlora_ext.library import LOADED

    info: dict[str, Any] = {
        "processor": _processor(),
        "logical_cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version(name) for name in ("transformers", "peft")},
        "threads": torch.get_num_threads(),
        "command": command or " ".join(sys.argv),
        "commit": (commit or _commit()) + _foreign(),
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }
    if LOADED:
        info["kernels"] = torch.ops.mlora_ext.cpu_isa()
        info["base_gemm"] = {
            dtype_name(dtype): torch.ops.mlora_ext.base_gemm(dtype)
            for dtype in (torch.float32, torch.bfloat16)
        }
    if torch.cuda.is_available():
        info |= _gpu()
    return info


def _gpu() -> dict[str, Any]:
    import triton

    properties = torch.cuda.get_device_properties(0)
    info: dict[str, Any] = {
        "gpu": properties.name,
        "gpu_capability": f"{properties.major}.{properties.minor}",
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "gpu_multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        info["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0]
    return info


def _commit() -> str:
    """The checkout's commit, marked where the product's files differ from it; `unknown` without git."""
    if not shutil.which("git") or not (CHECKOUT / ".git").exists():
        return "unknown"
    git = ["git", "-C", str(CHECKOUT)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run(
        [*git, "status", "--porcelain", "csrc", "mlora_ext", "python", "bench/*.py"],
        capture_output=True,
        text=True,
    )
    return (commit.stdout.strip() or "unknown") + (" with changes" if changed.stdout.strip() else "")


def _foreign() -> str:
    """Said beside the commit where the package that runs is not that of this checkout."""
    import mlora_ext

    mine = Path(mlora_ext.__file__).resolve().is_relative_to(CHECKOUT)
    return "" if mine else " of the benchmarks; mlora_ext is installed elsewhere"


class OtherProcesses:
    """How much of the machine other processes took inside the context: a result with more than a few percent
    is not to be trusted.

    Attributes:
        share: of all cores' time, between 0 and 1; None where the system does not tell.
    """

    share: float | None = None

    def __enter__(self) -> OtherProcesses:
        self._busy, self._own, self._wall = busy_seconds(), _own_seconds(), time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        busy, wall = busy_seconds(), time.monotonic() - self._wall
        if busy is not None and self._busy is not None:
            others = busy - self._busy - (_own_seconds() - self._own)
            self.share = round(max(0.0, others) / (wall * (os.cpu_count() or 1)), 3)


def busy_seconds() -> float | None:
    """Returns the seconds that all cores have worked since the machine started; None where nobody tells."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _, _, irq, softirq = map(int, stat.read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def resident(key: str) -> int:
    """Returns bytes that the kernel tells of this process: `VmRSS` now, `VmHWM` at most so far.

    `ru_maxrss` is, across fork and exec, at least the parent's.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _own_seconds() -> float:
    """Returns the processor seconds of this process and of its children that have ended."""
    return time.process_time() + sum(os.times()[2:4])


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
