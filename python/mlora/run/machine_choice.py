"""The library of the frozen products: measured once on a machine, then the same for all its runs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mlora.durable import write_whole
from mlora.errors import first_line
from mlora.run.environment import processor
from mlora.run.reporter import Reporter
from mlora_ext.backends.gpu_base_gemm import Record, lines, times_of
from mlora_ext.frozen.base_gemm import serves
from mlora_ext.library import LIBRARY

if TYPE_CHECKING:
    from mlora.engine.engine import Engine

_OF_CPU = ("aten", "onednn")


def base_gemm_of_machine(dtype: torch.dtype, reporter: Reporter) -> str | None:
    """Returns the library that this machine's runs multiply with; None if there is no choice for the dtype.

    The first run measures, and keeps the result in a file of the user's cache folder. Runs that begin at the
    same time agree on the first file. `reporter` is told of the choice and its file.
    """
    if not serves(torch.empty(0, dtype=dtype)):
        return None
    facts = {
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
    }
    library = None
    try:
        path = _path(facts)
        if not path.exists():
            library = _faster(dtype)
            _create(path, json.dumps(facts | {"base_gemm": library}, indent=1) + "\n")
        library = _read(path)
        reporter.note(f"base_gemm: {library}, as measured on this machine; to measure again, delete {path}")
    except (OSError, RuntimeError, ValueError) as error:  # no home folder, a full disk, a damaged file
        library = library or _faster(dtype)
        reporter.warn(f"base_gemm: {library}, measured for this run only: {first_line(error)}")
    return library


def base_gemm_of_gpu(engine: Engine, reporter: Reporter, *, keep: bool) -> None:
    """Has an engine on a GPU take the faster library for each shape of its frozen products.

    What was measured stands in a file of the user's cache folder, to which new shapes are added by one run
    at a time. Without `keep` nothing is written, and `reporter` is told of every choice.
    """
    if engine.device.type != "cuda":
        return
    facts = {
        "gpu": torch.cuda.get_device_name(engine.device),
        "torch": torch.__version__,
        "library": hashlib.sha256(LIBRARY.read_bytes()).hexdigest()[:16],
    }
    before: list[Record] = []
    fault = ""
    with ExitStack() as stack:
        try:
            path = _path(facts)
            before = _read_times(path)
            if keep:
                stack.enter_context(_alone(path, reporter))
                before = _read_times(path)
        except (OSError, ValueError) as error:  # no home folder, a full disk, a damaged file
            fault = first_line(error)
        times = engine.measure_base_gemm(before)
        new = [record for record in times if record not in before]
        if keep and new and not fault:
            try:
                content = json.dumps(facts | {"times": before + new}, indent=1) + "\n"
                write_whole(path, content.encode())
            except OSError as error:
                fault = first_line(error)
    if new and fault:
        reporter.warn(f"base_gemm: measured for this run only: {fault}")
    elif times and keep:
        reporter.note(f"base_gemm: for each shape as measured here; to measure again, delete {path}")
    for line in lines(times) if not keep else ():
        reporter.note(f"base_gemm: {line}")


def use_base_gemm(engine: Engine, library: str | None) -> None:
    """Sets a run's library; that of a run on a CPU does not concern a GPU."""
    if engine.device.type == "cuda":
        engine.base_gemm = None if library in _OF_CPU else library
    elif library:
        engine.base_gemm = library


@contextmanager
def _alone(path: Path, reporter: Reporter) -> Iterator[None]:
    """Waits until no other run measures for a file; creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reporter.note("base_gemm: waiting for another run, which measures")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _path(facts: Mapping[str, object]) -> Path:
    """Returns the file of a machine's choices; OSError if the user has no home."""
    return _cache_folder() / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.json"


def _read_times(path: Path) -> list[Record]:
    """Returns what a file holds of a GPU, nothing if there is none; ValueError if it is damaged."""
    if not path.exists():
        return []
    with suppress(ValueError, TypeError, KeyError):
        times: list[Record] = json.loads(path.read_bytes())["times"]
        times_of(times)
        return times
    raise ValueError(f"{path} is damaged; delete it")


def _cache_folder() -> Path:
    """Returns where the XDG specification puts a user's caches; OSError if the user has no home."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(root) if os.path.isabs(root) else Path("~/.cache").expanduser()) / "mlora" / "base_gemm"
    except RuntimeError as error:
        raise OSError(str(error)) from error


def _read(path: Path) -> str:
    with suppress(ValueError, TypeError, KeyError):
        if (library := json.loads(path.read_bytes())["base_gemm"]) in _OF_CPU:
            return str(library)
    raise ValueError(f"{path} is damaged; delete it")


def _create(path: Path, text: str) -> None:
    """Creates a file with all of its text at once; leaves one that another run has created meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(file.name, path)


def _faster(dtype: torch.dtype) -> str:
    """Times forward and dX with both libraries, best of 15; oneDNN must win by 30%.

    The compiled operators measure in the same way, but they tell what was set before if something was.
    """
    x, weight = torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    products: dict[str, Callable[..., object]] = {
        "aten": lambda weight: torch.mm(x, weight.t()),
        "onednn": partial(_onednn, x),
    }
    if dtype == torch.float16:  # aten converts where the processor cannot multiply
        return "aten"
    try:
        products["onednn"](weight)
    except (RuntimeError, AttributeError):  # oneDNN does not serve this processor, or torch has none
        return "aten"
    best = dict.fromkeys(products, float("inf"))
    for _ in range(15):
        for name, product in products.items():
            begun = time.perf_counter()
            product(weight)
            product(weight.t())
            best[name] = min(best[name], time.perf_counter() - begun)
    return "onednn" if 1.3 * best["onednn"] < best["aten"] else "aten"


def _onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return found
