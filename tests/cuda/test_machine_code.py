"""The compiled CUDA kernels spill nothing, and the 16-bit ones multiply with matrix instructions."""

import re
import sys
from pathlib import Path

import pytest

from mlora_ext import _C
from mlora_ext.library import LIBRARY

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from gpu import budget_report, code_cuda

TARGETS = [
    "sm_90a",
    *(pytest.param(name, marks=pytest.mark.nightly) for name in ("sm_80", "sm_100", "sm_120")),
]
PRODUCTS = ["shrink", "expand", "read_dy", "read_x"]


@pytest.mark.parametrize("architecture", TARGETS)
def test_machine_code(architecture: str) -> None:
    """One test, so that one process disassembles the library, which takes 15 s, and only once."""
    if not _C.build_info()["cuda"]:
        pytest.skip("the library was built without CUDA")
    if code_cuda.cuobjdump() is None:
        pytest.skip("there is no cuobjdump, neither on PATH nor in the package triton")
    kernels = code_cuda.kernels(LIBRARY, architecture)
    assert_no_kernel_spills(kernels, {"product", *(["read_dy_once"] if architecture == "sm_90a" else [])})
    assert_products_are_matrix_instructions(kernels)
    if architecture == "sm_90a":
        assert_frozen_products_run_by_themselves()
        assert_read_dy_in_one_pass_multiplies_in_groups()
    if architecture == budget_report.ARCHITECTURE:
        assert_mixed_ranks_cost_what_equal_ones_do()


def assert_no_kernel_spills(kernels: list[code_cuda.Kernel], more: set[str]) -> None:
    names = {kernel.name.split("<")[0] for kernel in kernels}
    assert names == {*PRODUCTS, "plan", "parts", "page", "dropout_mask", "probe", *more}
    for kernel in kernels:
        assert (kernel.local_bytes, kernel.local_accesses) == (0, 0), kernel


def assert_products_are_matrix_instructions(kernels: list[code_cuda.Kernel]) -> None:
    sixteen_bit = [
        kernel
        for kernel in kernels
        if kernel.name.split("<")[0] in PRODUCTS and ("BFloat16" in kernel.name or "Half" in kernel.name)
    ]
    assert len({kernel.name for kernel in sixteen_bit}) == len(PRODUCTS) * 2 * 4, "four widths of two dtypes"
    for kernel in sixteen_bit:
        assert kernel.matrix.total() > 0, kernel


def assert_mixed_ranks_cost_what_equal_ones_do() -> None:
    """By the computed cost, whose bytes the emulator has counted (test_gpu_budget.py): at most 5% more."""
    shares = [float(line.split()[-1]) for line in budget_report.mixtures() if line.startswith("  ")]
    assert len(shares) == len(budget_report.MODES) * 3
    assert max(shares) <= 1.05


def code_of(kernel: str) -> list[list[str]]:
    """Of each kernel of this name, of sm_90a."""
    functions = code_cuda.machine_code(LIBRARY, "sm_90a").items()
    own = [lines for name, lines in functions if re.search(rf"\d{kernel}_kernel", name)]
    return [re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", "\n".join(lines), re.MULTILINE) for lines in own]


def assert_frozen_products_run_by_themselves() -> None:
    """Products of a stage are one group, which nothing waits for one by one (ptxas: C7515, C7519, C7520)."""
    products = code_of("product")
    assert len(products) == 2 * 2 * 4, "dtypes, clusters; forward, and backward of three kinds of masks"
    for code in products:
        places = [i for i, text in enumerate(code) if "HGMMA.64x256x16" in text]
        groups = [i for i in places if "gsb0" in code[i]]
        assert len(places) == 4 * len(groups) > 0
        assert sum("WARPGROUP.DEPBAR" in text for text in code[places[0] : groups[-1]]) <= len(groups)
        assert not any("MEMBAR" in text for text in code[places[0] : groups[-1]]), "in the main loop"
        assert any("UTMALDG" in text for text in code)
        assert any("UTMASTG" in text for text in code)


def assert_read_dy_in_one_pass_multiplies_in_groups() -> None:
    """A tile's products are one group of ds and one of dB; no fence of all memory stands in the loop."""
    bodies = []
    for code in code_of("read_dy_once"):
        places = [i for i, text in enumerate(code) if "HGMMA" in text]
        groups = [i for i in places if "gsb0" in code[i]]
        assert len(places) == 16 * len(groups) > 0
        bodies.append(len(groups) // 2)
        fences = [text for text in code if "MEMBAR" in text and "CTA" not in text]
        assert len(fences) <= 5 * bodies[-1], "when a cluster begins, and two of each ticket"
        assert any("STAS" in text for text in code)
    assert sorted(bodies) == [1, 1, 2, 3], "fp16 has one body, bf16 one for each width"
