"""What a run of the suite is asked to do, its command line, and what it has found so far."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from linear.layouts import LAYOUTS
from linear.limits import Ceilings, measure_ceilings
from shared.results import dtype_name
from shared.shapes import MODELS

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
        """When a section that has this part of the time left must start no more rows."""
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


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def argument(kind: type, what: str, accept: Callable[[Any], bool]) -> Callable[[str], Any]:
    """Returns what reads a number of the command line, or says what was expected."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan  # which no range holds
        if not accept(value):
            raise argparse.ArgumentTypeError(f"expected {what}, got {text}")
        return value

    return read


CORES = os.cpu_count() or 1
seconds = argument(float, "seconds", lambda value: 0 <= value < math.inf)
positive = argument(int, "an integer of at least 1", lambda value: value >= 1)
probability = argument(float, "a probability with 0 <= p < 1", lambda value: 0 <= value < 1)
threads = argument(
    int, f"at least 1 and at most {CORES}, the processors of this machine", lambda value: 1 <= value <= CORES
)
"""More threads only wait for each other."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage has thirty options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help lists the options\n")


def parser(program: str, about: str, sections: Iterable[str]) -> argparse.ArgumentParser:
    """The command line."""
    lines = argparse.RawDescriptionHelpFormatter
    found = Parser(prog=program, description=about, formatter_class=lines)
    add = found.add_argument
    add("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(sections)}; default: all")
    add("--device", help="cpu, cuda or cuda:<index>; default: cuda if there is one")
    add("--dtype", nargs="+", choices=DTYPES, help="default: bfloat16, on a CPU float32 too")
    add("--backend", nargs="+", choices=["reference", "cpu", "triton", "cuda"], help="default: all there are")
    add("--base-gemm", choices=["cublas", "mlora", "fastest"], help="on sm_90; default: cublas")
    add("--models", nargs="+", choices=MODELS, help="default: the five real ones, on a CPU tinyllama")
    add("--rows", nargs="+", type=positive, help="of a batch, over all adapters; default: 8192, on a CPU 512")
    add("--adapters", nargs="+", type=positive, help="how many; default: 8, in `adapters` 1 to 64")
    add("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="of rows; default: both")
    add("--dropout", type=probability, default=0.1, help="default: 0.1")
    add("--rounds", type=positive, help="timed turns of each contender; default: 15")
    add("--threads", type=threads, help="of PyTorch on the CPU; default: PyTorch's own")
    add("--time-limit", type=seconds, metavar="SECONDS", help="start no row after this; results say so")
    add("--out", type=Path, metavar="FOLDER", help="write suite.json, suite.txt and suite.png there")
    add("--commit", help="of a source folder that is no git checkout, for the results")
    add("--check", action="store_true", help="compare every contender at every shape that is timed")
    add("--quick", action="store_true", help="tiny sizes, few rounds")
    return found


def complete(options: argparse.Namespace) -> tuple[Settings, dict[str, str]]:
    """Fill in the defaults of the device.

    Returns:
        The settings, and why backends that were not asked for by name are missing.

    Raises:
        ValueError: if the device or a backend that was asked for is not there.
    """
    try:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"--device: expected cpu, cuda or cuda:<index>, got {options.device!r}") from error
    if device.type not in BACKENDS or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"--device: expected a device that this torch sees, got {device}")
    cpu = device.type == "cpu"
    if options.base_gemm:
        mx.use_gpu_base_gemm(options.base_gemm)
    reasons = {name: available(name, device) for name in options.backend or BACKENDS[device.type]}
    missing = {name: reason for name, reason in reasons.items() if reason is not None}
    if missing and options.backend:
        raise ValueError(f"--backend: {'; '.join(missing.values())}")
    real = [name for name in MODELS if name != "quick"]
    models = ["quick"] if options.quick else ["tinyllama"] if cpu else real
    rows = [96] if options.quick else [512] if cpu else [8192]
    dtypes = options.dtype or (["float32"] if options.quick and cpu else ["float32", "bfloat16"][not cpu :])
    settings = Settings(
        device=device,
        dtypes=tuple(DTYPES[name] for name in dtypes),
        backends=tuple(name for name, reason in reasons.items() if reason is None),
        models=tuple(options.models or models),
        rows=tuple(options.rows or rows),
        adapters=tuple(options.adapters or []),
        layouts=tuple(options.layouts),
        dropout=options.dropout,
        rounds=options.rounds or (2 if options.quick else 15),
        quick=options.quick,
        check=options.check,
        base_gemm=options.base_gemm,
    )
    return settings, {f"backend {name}": reason for name, reason in missing.items()}
