"""The backends that tests run on: on this machine's CPU all of them, on a GPU those of the GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import mlora_ext as mx
from mlora_ext import segments

BACKENDS = ["cpu", "triton", pytest.param("triton on a GPU", marks=pytest.mark.gpu)]
SMALL_TABLE = 8


@contextmanager
def serving(what: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[mx.backend.Backend]:
    """Serve the operator by one backend; new tensors lie where it works.

    On a CPU, `triton` runs in Triton's interpreter and `cuda` in an emulator, program by program: small
    tables of segments spare them most of the programs that have nothing to do.
    """
    name, _, where = what.partition(" on a ")
    if where == "GPU" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if name != "cpu" and not where:
        if torch.cuda.is_available():
            pytest.skip("runs on the GPU of this machine instead")
        monkeypatch.setattr(segments, "SMALLEST_TABLE", SMALL_TABLE)
    torch.set_default_device("cuda" if where == "GPU" else None)
    try:
        with mx.use_backend(name):
            yield name
    finally:
        torch.set_default_device(None)
