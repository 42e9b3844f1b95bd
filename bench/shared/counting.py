"""How many launches and how much memory a function takes.

On a GPU, launches are the kernels, copies and clears that the device ran, as `torch.profiler` saw them. A CPU
launches nothing: there the operators that PyTorch's dispatcher called are counted, under a name of their own.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

Run = Callable[[], object]
LAUNCHED = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass
class Counts:
    """What one call took.

    Attributes:
        peak_bytes: largest sum of tensors that were alive at once, beyond those before the call.
        launches: on a GPU.
        device_seconds: on a GPU, the sum over its launches.
        operator_calls: on a CPU.
    """

    peak_bytes: int
    launches: int | None = None
    device_seconds: float | None = None
    operator_calls: int | None = None


def count(run: Run, device: torch.device | str) -> Counts:
    """Run once or twice under observation.

    Raises:
        RuntimeError: if the profiler saw nothing run on the GPU; a count of zero would be wrong.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch 2.13's profiler prints two lines per use
    place = torch.device(device)
    if place.type != "cuda":
        return Counts(live_peak(run), operator_calls=operator_calls(run))
    peak = _device_peak(run, place)
    torch.cuda.synchronize(place)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize(place)
    launches, seconds = launches_in(trace_events(seen))
    if not launches:
        raise RuntimeError("torch.profiler: expected kernels on the GPU, saw none; may it trace this device?")
    return Counts(peak, launches, seconds)


def launches_in(events: Iterable[dict[str, Any]]) -> tuple[int, float]:
    """Launches of a Chrome trace, and the sum of their seconds."""
    durations = [event["dur"] for event in events if event.get("cat") in LAUNCHED]
    return len(durations), sum(durations) * 1e-6


def live_peak(run: Run) -> int:
    """Peak of the live tensors that a function makes on the CPU, its results included, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        results = run()
    del results
    return peak_in(trace_events(seen))


def peak_in(events: Iterable[dict[str, Any]]) -> int:
    """Largest running sum of a trace's allocations, in bytes."""
    live = peak = 0
    memory = [event for event in events if event.get("name") == "[memory]"]
    for event in sorted(memory, key=lambda event: event["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak


def operator_calls(run: Run) -> int:
    """Operators that PyTorch's dispatcher calls below autograd, forward and backward."""
    with _Counter() as counter:
        run()
    return counter.calls


def trace_events(seen: profile) -> list[dict[str, Any]]:
    """The events of a finished profile, as its Chrome trace has them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]  # type: ignore[no-any-return]


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def _device_peak(run: Run, place: torch.device) -> int:
    torch.cuda.synchronize(place)
    before = torch.cuda.memory_allocated(place)
    torch.cuda.reset_peak_memory_stats(place)
    results = run()
    torch.cuda.synchronize(place)
    del results
    return torch.cuda.max_memory_allocated(place) - before
