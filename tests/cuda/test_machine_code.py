"""The compiled CUDA kernels spill nothing, and the 16-bit ones multiply with matrix instructions."""

import sys
from pathlib import Path

import pytest

from mlora_ext import _C
from mlora_ext.library import LIBRARY

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from gpu import code_cuda

TARGETS = [
    "sm_90a",
    *(pytest.param(name, marks=pytest.mark.nightly) for name in ("sm_80", "sm_100", "sm_120")),
]
PRODUCTS = ["shrink", "expand", "read_dy", "read_x"]


@pytest.fixture(scope="module", params=TARGETS)
def kernels(request: pytest.FixtureRequest) -> list[code_cuda.Kernel]:
    """Of one architecture."""
    if not _C.build_info()["cuda"]:
        pytest.skip("the library was built without CUDA")
    if code_cuda.cuobjdump() is None:
        pytest.skip("there is no cuobjdump, neither on PATH nor in the package triton")
    return code_cuda.kernels(LIBRARY, request.param)


def test_no_kernel_spills(kernels: list[code_cuda.Kernel]) -> None:
    names = {kernel.name.split("<")[0] for kernel in kernels}
    assert names == {*PRODUCTS, "plan", "dropout_mask", "probe"}
    for kernel in kernels:
        assert (kernel.local_bytes, kernel.local_accesses) == (0, 0), kernel


def test_products_are_matrix_instructions(kernels: list[code_cuda.Kernel]) -> None:
    sixteen_bit = [
        kernel
        for kernel in kernels
        if kernel.name.split("<")[0] in PRODUCTS and ("BFloat16" in kernel.name or "Half" in kernel.name)
    ]
    assert len({kernel.name for kernel in sixteen_bit}) == len(PRODUCTS) * 2 * 4, "four widths of two dtypes"
    for kernel in sixteen_bit:
        assert kernel.matrix.total() > 0, kernel


def test_mixed_ranks_cost_what_equal_ones_do(kernels: list[code_cuda.Kernel]) -> None:
    """By the computed cost, whose bytes the emulator has counted (test_gpu_budget.py): at most 5% more."""
    from gpu import budget_report

    if kernels[0].architecture != budget_report.ARCHITECTURE:
        pytest.skip("the budget is of another architecture")
    shares = [float(line.split()[-1]) for line in budget_report.mixtures() if line.startswith("  ")]
    assert len(shares) == len(budget_report.MODES) * 3
    assert max(shares) <= 1.05
