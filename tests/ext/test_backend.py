"""Which backend serves what, and what is refused."""

import os
import subprocess
import sys

import pytest
import torch
from cases import make

import mlora_ext as mx
from mlora_ext.backends import selection as backend
from mlora_ext.backends.selection import backend_for
from mlora_ext.frozen.plain import PlainWeight

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def no_memory():
    backend._on_a_gpu.cache_clear()
    yield
    backend._on_a_gpu.cache_clear()


@pytest.mark.parametrize(
    ("kernels", "driver", "expected"),
    [(True, "", "cuda"), (True, "too old", "triton"), (False, "", "triton")],
)
def test_by_device(monkeypatch: pytest.MonkeyPatch, kernels: bool, driver: str, expected: str) -> None:
    """On a GPU the compiled kernels, where this build has them and the driver is not too old."""
    monkeypatch.setattr(backend, "_has_kernel", lambda key: kernels and key == "CUDA")
    monkeypatch.setattr(torch.ops.mlora_ext.cuda_driver_refusal, "default", lambda: driver)
    assert backend_for(CPU, torch.float32) == "cpu"
    assert backend_for(GPU, torch.bfloat16) == expected
    with pytest.raises(ValueError, match="no backend serves device 'meta'"):
        backend_for(torch.device("meta"), torch.float32)
    if driver:
        backend.gpu_operator.cache_clear()
        with pytest.raises(ValueError, match="backend 'cuda': too old, or use 'triton'"):
            mx.use_backend("cuda")


@pytest.mark.usefixtures("no_cuda_kernels")
def test_a_backend_that_is_missing_is_refused() -> None:
    with pytest.raises(ValueError, match="backend 'cuda': this build has no CUDA kernels"):
        mx.use_backend("cuda")
    with pytest.raises(ValueError, match="backend: expected one of reference, cpu, triton, cuda, got 'tpu'"):
        mx.use_backend("tpu")  # type: ignore[arg-type]


def test_the_interpreter_must_be_on_before_python_starts() -> None:
    """Else Triton's own library is compiled, and ours interpreted."""
    program = """
import os, torch, triton, mlora_ext as mx
os.environ["TRITON_INTERPRET"] = "1"
from mlora_ext.backends.selection import backend_for
with mx.use_backend("triton"):
    backend_for(torch.device("cpu"), torch.float32)
"""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert "ValueError: backend 'triton' serves CPU tensors only in Triton's interpreter" in run.stderr


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make([4], [6], [0])
    monkeypatch.setattr("mlora_ext.backends.triton.INTERPRETED", False)
    with (
        mx.use_backend("triton"),
        pytest.raises(ValueError, match="set TRITON_INTERPRET=1 before Python starts"),
    ):
        mx.multi_lora_linear(*case.arguments())


def test_a_compiled_graph_of_cpu_tensors_has_no_gpu_backend() -> None:
    case = make([4], [6], [0])
    x, weight, *rest = case.operator_arguments()
    function = torch.compile(
        lambda x: mx.ops.functional.lora_linear_rows(x, PlainWeight.of(weight), *rest),
        fullgraph=True,
        backend="aot_eager",
    )
    with mx.use_backend("triton"), pytest.raises(Exception, match="compile of CPU tensors"):
        function(x)
