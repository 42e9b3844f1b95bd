"""The options of the suite's command line, and what they are where they are not given."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import torch
from linear.layouts import LAYOUTS
from shared.shapes import MODELS

import mlora_ext as mx
from microbench.settings import BACKENDS, Settings, available

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def number(text: str) -> float:
    """A number, or NaN, which no range holds."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def seconds(text: str) -> float:
    """A time of the command line."""
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds, got {text}")
    return value


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage has thirty options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help lists the options\n")


def parser(program: str, about: str, sections: Iterable[str]) -> argparse.ArgumentParser:
    """The command line.

    Args:
        program: its name.
        about: what help says first.
        sections: names of those that there are.
    """
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


def positive(text: str) -> int:
    """An integer of at least 1."""
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return value


def threads(text: str) -> int:
    """As many as this machine has processors, at most: more only wait for each other."""
    value, most = positive(text), os.cpu_count() or 1
    if value > most:
        raise argparse.ArgumentTypeError(
            f"expected at most {most}, the processors of this machine, got {text}"
        )
    return value


def probability(text: str) -> float:
    """A number of at least 0 and below 1."""
    value = number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a probability with 0 <= p < 1, got {text}")
    return value


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
