"""What a run of the suite is asked to do, and what it has found so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from linear.limits import Ceilings, measure_ceilings
from shared.results import dtype_name

import mlora_ext as mx
from mlora_ext.backends.selection import Backend, backend_for
from mlora_ext.library import check_library

BACKENDS: dict[str, tuple[Backend, ...]] = {"cpu": ("cpu",), "cuda": ("triton", "cuda")}


@dataclass(frozen=True)
class Settings:
    """Options of the command line, complete.

    Attributes:
        device: `cpu`, `cuda` or `cuda:<index>`.
        dtypes: of weights, activations and adapters.
        backends: those that serve the device in this build.
        models: names in `shapes.MODELS`.
        rows: rows of a batch, over all adapters.
        adapters: numbers of adapters; empty: each section's own.
        layouts: names in `layouts.LAYOUTS`.
        dropout: probability.
        rounds: timed turns of each contender.
        quick: tiny sizes, to try the suite and not the machine.
        check: compare every contender at every shape that is timed.
        base_gemm: who makes the frozen products of `cuda`; None: cuBLAS.
    """

    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    backends: tuple[Backend, ...]
    models: tuple[str, ...]
    rows: tuple[int, ...]
    adapters: tuple[int, ...]
    layouts: tuple[str, ...]
    dropout: float = 0.1
    rounds: int = 15
    quick: bool = False
    check: bool = False
    base_gemm: str | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of adapters, in sections that have none of their own."""
        return self.adapters or ((3,) if self.quick else (8,))


@dataclass
class Findings:
    """What a run has found.

    Attributes:
        rows: the results, one for each case.
        checks: relative error of each contender on the small shape, by dtype.
        skipped: peers that cannot do what was asked, and why.
        failed: what went wrong; a run with any ends with a non-zero exit code.
        not_run: cases for which no time was left.
        ceilings: speeds measured in this run, by dtype.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: dict[str, dict[str, float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    not_run: list[str] = field(default_factory=list)
    ceilings: dict[str, Ceilings] = field(default_factory=dict)

    def ceiling(self, settings: Settings, dtype: torch.dtype) -> Ceilings:
        """The speeds of a dtype, measured at the first question."""
        name = dtype_name(dtype)
        if name not in self.ceilings:
            self.ceilings[name] = measure_ceilings(settings.device, dtype, settings.quick)
        return self.ceilings[name]


@dataclass(frozen=True)
class Case:
    """One row of a section, not yet measured."""

    label: str
    run: Callable[[], dict[str, Any]]


Section = Callable[[Settings, Findings], Iterator[Case]]


class Deadline:
    """Seconds that a run may take, shared by sections that have not begun."""

    def __init__(self, seconds: float | None) -> None:
        self._begin, self._seconds = time.monotonic(), seconds

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begin

    def share(self, part: float) -> float | None:
        """When a section that has this part of the time left must start no more rows.

        Returns:
            Seconds since the beginning; None: never.
        """
        if self._seconds is None:
            return None
        elapsed = self.elapsed
        return elapsed + max(0.0, self._seconds - elapsed) * part


def failures() -> tuple[type[Exception], ...]:
    """What a contender may raise without ending the run: PyTorch's errors, ours and Triton's."""
    if torch.cuda.is_available():
        from triton.errors import TritonError

        return RuntimeError, ValueError, TypeError, TritonError
    return RuntimeError, ValueError, TypeError


def first_line(error: BaseException) -> str:
    """`TypeError: the first line of its message`."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def available(backend: str, device: torch.device) -> str | None:
    """Why this build does not have a backend for a device; None where it has it."""
    try:
        with mx.use_backend(backend):  # type: ignore[arg-type]
            if backend_for(device, torch.float32) != "reference":
                check_library()
            return None
    except (ValueError, RuntimeError) as error:
        return str(error)
