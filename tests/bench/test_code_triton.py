"""Every Triton kernel, compiled ahead of time for sm_80 and sm_90 from the launcher's own arguments."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MATRIX_KERNELS = {"shrink", "expand", "read_dy", "read_x"}
PROGRAM = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[1])
from gpu import code_triton
architecture = int(sys.argv[2])
variants = [one for one in code_triton.VARIANTS if sys.argv[3] in one.name]
found = code_triton.report(architecture, variants)
def seen(rows, rank, other_rank):
    variant = dataclasses.replace(code_triton.VARIANTS[0], rank=rank)
    launches = code_triton.launches_of(variant, rows, other_rank)
    return [(l.kernel.__name__, code_triton.specialisation(l), l.options) for l in launches]
print(json.dumps({
    "code": [{"variant": name, **vars(code)} for name, code in found],
    "specialisations": [seen(*how) for how in ((1089, 64, 8), (1104, 64, 8), (1089, 20, 8), (1104, 130, 3))],
}))
"""
QUICKEST = ("90", "fp16, r 16")


@cache
def report_of(architecture: str, variant: str) -> dict:
    """Outside of the interpreter, which the other tests use; what was compiled is kept with the build."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(ROOT / "build" / "triton")
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(ROOT / "bench"), architecture, variant]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


EVERY_VARIANT = [pytest.param(name, "", marks=pytest.mark.nightly) for name in ("80", "90")]


@pytest.mark.parametrize(("architecture", "variant"), [QUICKEST, *EVERY_VARIANT])
def test_no_spills_and_matrix_instructions(architecture: str, variant: str) -> None:
    """The quickest variant; all of them take half a minute for each architecture."""
    report = report_of(architecture, variant)["code"]
    assert report
    names = {code["name"] for code in report}
    assert names == MATRIX_KERNELS | {"reduce_rows", "reduce_gradients"}
    for code in report:
        assert 0 < code["registers"] <= 255
        assert code["shared_bytes"] <= 163 * 1024, code
        assert code["local_bytes"] == code["local_accesses"] == 0, code
        if code["name"] in MATRIX_KERNELS and not code["variant"].startswith("fp32"):
            assert sum(code["matrix"].values()) > 0, code


def test_rows_and_ranks_recompile_nothing() -> None:
    """What a compiled kernel is looked up by is the same whatever the number of rows and the ranks."""
    first, *others = report_of(*QUICKEST)["specialisations"]
    assert {name for name, _, _ in first} >= MATRIX_KERNELS
    for other in others:
        assert other == first


SUMS = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mlora_ext.backends.triton.blocks import product

@triton.jit
def kernel(x, y, out, blocks):
    i, j = tl.arange(0, 16), tl.arange(0, 64)
    sums = tl.zeros([16, 64], dtype=tl.float32)
    for block in range(0, blocks):
        a = tl.load(x + block * 256 + i[:, None] * 16 + i[None, :])
        b = tl.load(y + block * 1024 + i[:, None] * 64 + j[None, :])
        sums = product(a, b, sums, False)
    tl.store(out + i[:, None] * 64 + j[None, :], sums)

types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "blocks": "i32"}
ptx = triton.compile(ASTSource(kernel, types), target=GPUTarget("cuda", 90, 32)).asm["ptx"]
print(ptx.count("fma.rn.f32"), ptx.count("add.f32") + ptx.count("add.rn.f32"))
"""


@pytest.mark.nightly
def test_fp32_blocks_are_summed_by_themselves(tmp_path: Path) -> None:
    """Not in one chain with the sums of the blocks before, into which the compiler may join them."""
    (tmp_path / "sums.py").write_text(SUMS)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", str(tmp_path / "sums.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    multiplied, added = map(int, done.stdout.split())
    assert multiplied == 16 * added > 0
