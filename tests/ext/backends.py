"""The backends that tests run on: on this machine's CPU all of them, on a GPU those of the GPU."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import mlora_ext as mx
from mlora_ext.backends.selection import Backend
from mlora_ext.ops import segments

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cuda"))
import emulated

BACKENDS = [
    "cpu",
    "triton",
    "cuda",
    pytest.param("triton on a GPU", marks=pytest.mark.gpu),
    pytest.param("cuda on a GPU", marks=pytest.mark.gpu),
    pytest.param("cuda with own products on a GPU", marks=pytest.mark.gpu),
]
SMALL_TABLE = 4


def case(backend: Any, *more: Any, slow: bool) -> Any:
    """A test's parameters; slow ones of `triton`, which runs in an interpreter, are nightly."""
    name, marks = (backend, ()) if isinstance(backend, str) else (*backend.values, backend.marks)
    nightly = (pytest.mark.nightly,) if slow and name == "triton" else ()
    return pytest.param(name, *more, marks=(*marks, *nightly), id="-".join(map(str, (name, *more))))


QUICK = [case(backend, slow=True) for backend in BACKENDS]
"""All of them; `triton` is nightly."""


def by_dtype(backends: list, dtypes: list[torch.dtype], quick: torch.dtype) -> list:
    """Backends and dtypes; of `triton` all but `quick` are nightly."""
    return [case(one, dtype, slow=dtype != quick) for one in backends for dtype in dtypes]


def load_emulator() -> None:
    """Give the `cuda` backend CPU tensors, through the emulator of tests/cuda."""
    if emulated.missing():
        pytest.skip(emulated.missing())
    emulated.load()


@cache
def interpreter_works() -> bool:
    """Whether Triton's interpreter gets on with this numpy: 3.6 makes integers of arrays of one element."""
    new_numpy = tuple(map(int, version("numpy").split(".")[:2])) >= (2, 4)
    return not (new_numpy and version("triton").startswith("3.6."))


def quick_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save Triton's interpreter half of its time, and change nothing that it computes.

    It puts its own functions into `triton.language` at each launch, and again at each call of a function
    inside a kernel, where they are already: here once a launch for each module that a kernel's code lies in.
    It also computes at each sum or product whether an integer overflows, a third of the rest, but asserts it
    only where it debugs: `test_gpu_sizes` runs one case so.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[int] = set()

    def patch_new(fn):
        module = id(fn.__globals__)
        if module in done:
            return None
        done.add(module)
        return patch(fn)

    def launch_anew(*arguments, **named):
        done.clear()
        launch(*arguments, **named)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_new)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_anew)


@contextmanager
def serving(what: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """Serve the operator by one backend; new tensors lie where it works.

    On a CPU, `triton` runs in Triton's interpreter and `cuda` in an emulator, program by program: small
    tables of segments spare them most of the programs that have nothing to do.
    """
    name, _, where = what.partition(" on a ")
    name, _, own = name.partition(" with ")
    if where == "GPU" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if name != "cpu" and not where:
        if torch.cuda.is_available():
            pytest.skip("runs on the GPU of this machine instead")
        monkeypatch.setattr(segments, "SMALLEST_TABLE", SMALL_TABLE)
    if name == "triton" and not where and not interpreter_works():
        pytest.skip("Triton 3.6's interpreter needs numpy < 2.4")
    if name == "triton" and not where:
        quick_interpreter(monkeypatch)
    if name == "cuda" and not where:
        load_emulator()
    if own and where and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("own products are of sm_90")
    torch.set_default_device("cuda" if where == "GPU" else None)
    try:
        with mx.use_backend(name):
            if own:
                mx.use_gpu_base_gemm("mlora")
            yield name
    finally:
        torch.set_default_device(None)
        if own:
            mx.use_gpu_base_gemm(None)


def fixture_of(backends: list, *, autouse: bool = True) -> Any:
    """Returns the fixture `backend` of a file: each of its tests is served by every one of these."""

    @pytest.fixture(params=backends, autouse=autouse)
    def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
        with serving(request.param, monkeypatch) as name:
            yield name

    return backend
