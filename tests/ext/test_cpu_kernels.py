"""The CPU kernels of every compiled instruction set, the frozen product, and the argument checks in C++."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from cases import CASES, assert_right, make
from tolerances import assert_as_exact, assert_same_up_to_rounding
from torch._subclasses.fake_tensor import FakeTensorMode

import mlora_ext as mx
from mlora_ext import _C
from mlora_ext.frozen import base_gemm as gemm
from mlora_ext.frozen.base_gemm import frozen_linear
from mlora_ext.frozen.plain import PlainWeight
from mlora_ext.ops.dropout import philox_mask

OPS = torch.ops.mlora_ext
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@contextmanager
def frozen_product_by(library: str) -> Iterator[None]:
    before = {dtype: OPS.base_gemm(dtype) for dtype in DTYPES[:2]}
    for dtype in before:
        with suppress(RuntimeError):  # not every processor has it
            OPS.set_base_gemm(dtype, library)
    yield
    for dtype, name in before.items():
        OPS.set_base_gemm(dtype, name)


@pytest.fixture(params=_C.build_info()["cpu_isas"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set, beside the frozen product that plain PyTorch computes as well."""
    before = OPS.cpu_isa()
    try:
        OPS.use_cpu_isa(request.param)
    except RuntimeError as error:
        pytest.skip(str(error))
    with frozen_product_by("aten"):
        yield request.param
    OPS.use_cpu_isa(before)


@pytest.fixture(params=["aten", "onednn"])
def base(request: pytest.FixtureRequest) -> Iterator[str]:
    with frozen_product_by(request.param):
        yield request.param


def test_the_best_instruction_set_is_used(request: pytest.FixtureRequest) -> None:
    info = _C.build_info()
    assert info["cpu_isa"] in info["cpu_isas"]
    assert OPS.cpu_isa() == (request.config.getoption("cpu_isa") or info["cpu_isa"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_on_every_instruction_set(isa: str, name: str, dtype: torch.dtype) -> None:
    case = CASES[name](dtype=dtype, p=0.2)
    assert_right(case)


@pytest.mark.pairwise
@pytest.mark.parametrize("rank", [1, 3, 8, 17, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tails_of_tiles(isa: str, dtype: torch.dtype, rank: int) -> None:
    """Columns beyond whole vectors, words and tiles; rows beyond whole blocks."""
    case = make([rank], [131], [0], d_in=2115, d_out=323, dtype=dtype, p=0.3)
    assert_right(case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_several_groups_of_blocks(isa: str, dtype: torch.dtype) -> None:
    """Adapters with many, few and no rows, some of them in pieces between the others'."""
    case = make(
        [16, 8, 40, 5], [300, 70, 250, 1, 33, 0], [0, 1, 0, 2, 1, 3], d_in=96, d_out=72, dtype=dtype, p=0.3
    )
    assert_right(case)


@pytest.mark.parametrize("adapter_dtype", [None, torch.float32], ids=["as x", "fp32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adapters_of_one_task_beside_those_of_several(
    isa: str, dtype: torch.dtype, adapter_dtype: torch.dtype | None
) -> None:
    """Who packs an adapter's matrices, its only task or all together, changes no bit of it."""
    ranks, lengths = [16, 70, 3, 8, 40, 5], [50, 64, 600, 7, 0, 129]
    case = make(
        ranks, lengths, list(range(6)), d_in=200, d_out=136, dtype=dtype, adapter_dtype=adapter_dtype, p=0.3
    )
    assert_right(case)
    x, weight, bias, lora_a, lora_b, _, scaling, p, rng, layer = case.operator_arguments()
    dy = case.dy.reshape(len(x), -1)

    def low_rank(rows: slice, which: slice, lengths: list[int]) -> tuple[torch.Tensor, ...]:
        own = lora_a[which], lora_b[which]
        table = mx.SegmentLayout.from_lengths(lengths, list(range(len(lengths)))).table()
        plan = table, scaling[which], p[which], rng[which], layer
        with torch.no_grad():
            _, s = OPS.lora_linear(x[rows], weight, bias, *own, *plan, None)
            _, da, db = OPS.lora_linear_backward(
                dy[rows], x[rows], weight, *own, s, *plan, True, True, True, None
            )
        return s, *da, *db

    together = low_rank(slice(None), slice(None), lengths)
    begin = 0
    for i, (rank, count) in enumerate(zip(ranks, lengths, strict=True)):
        rows = slice(begin, begin + count)
        s, da, db = low_rank(rows, slice(i, i + 1), [count])
        assert torch.equal(s[:, :rank], together[0][rows, :rank])
        assert torch.equal(da, together[1 + i])
        assert torch.equal(db, together[7 + i])
        begin += count


@pytest.mark.parametrize("columns", [1, 7, 64, 517])
def test_masks_are_philox(isa: str, columns: int) -> None:
    seeds, step, layer, p = [2**63 + 11, 3], 2**32 + 5, 9, [0.1, 0.75]
    layout = mx.SegmentLayout.from_lengths([70, 3, 5], adapters=[1, -1, 0])
    tensors = mx.LoRADropout(p=p, seeds=seeds, step=step, layer=layer).tensors("cpu")
    mask = OPS.dropout_mask(layout.table(), *tensors, 78, columns)
    for rows, adapter in ((slice(0, 70), 1), (slice(73, 78), 0)):
        count = rows.stop - rows.start
        expected = philox_mask(count, columns, p=p[adapter], seed=seeds[adapter], step=step, layer=layer)
        assert torch.equal(mask[rows], expected)
    assert mask[70:73].all()


def test_philox_known_answer() -> None:
    """Random123's vector for key 0, counter 0: 5f6fb709 0d893f64 4f121f81 4f730a48."""
    numbers = [0xB709, 0x5F6F, 0x3F64, 0x0D89, 0x1F81, 0x4F12, 0x0A48, 0x4F73]
    for p in (0.3, 0.6, 0.9):
        tensors = mx.LoRADropout(p=[p], seeds=[0]).tensors("cpu")
        mask = OPS.dropout_mask(mx.SegmentLayout.from_lengths([1]).table(), *tensors, 1, 8)
        assert mask[0].tolist() == [number >= round(p * 65536) for number in numbers]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    ("rows", "d_in", "d_out"), [(9, 33, 17), (130, 97, 129)], ids=["aten whatever was chosen", "as chosen"]
)
def test_frozen_product(
    base: str, dtype: torch.dtype, transposed: bool, rows: int, d_in: int, d_out: int
) -> None:
    if OPS.base_gemm(dtype) != base:
        pytest.skip(f"{base} does not serve {dtype} on this processor")
    x, dy = torch.randn(rows, d_in + 7, dtype=dtype)[:, :d_in], torch.randn(rows, d_out, dtype=dtype)
    weight = torch.randn(d_in, d_out, dtype=dtype).T if transposed else torch.randn(d_out, d_in, dtype=dtype)
    bias = torch.randn(d_out, dtype=dtype)
    assert gemm.base_gemm_of(dtype) == {str(dtype).removeprefix("torch."): base}
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    assert_as_exact(
        gemm.linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias), exact, f"y by {base}"
    )
    assert_as_exact(gemm.linear_dx(dy, weight), dy @ weight, dy.double() @ weight.double(), f"dx by {base}")
    assert gemm.linear(x[:0], weight).shape == (0, d_out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(6, 4)}, r"weight: expected a CPU matrix \[d_out, 5\], got shape \[6, 4\]"),
        ({"weight": torch.zeros(6, 5).half()}, "weight: expected dtype Float .that of x., got Half"),
        ({"bias": torch.zeros(5)}, "bias: expected a CPU Float vector of 6 numbers, got Float of shape"),
        ({"lora_a": []}, "lora_b: expected as many matrices as lora_a .0., got 1"),
        ({"lora_b": [torch.zeros(6, 3)]}, r"lora_b\[0\]: expected rank 2 .that of lora_a\[0\]., got 3"),
        ({"segments": torch.tensor([[0, 9, 0, 0]])}, r"segments\[0\]: expected rows within \[0, 4\)"),
        (
            {"segments": torch.tensor([[0, 2, 1, 0]])},
            r"segments\[0\]: expected an adapter in \[-1, 1\), got 1",
        ),
        (
            {"segments": torch.tensor([[0, 3, 0, 0], [2, 4, 0, 0]])},
            r"segments\[1\]: expected rows within \[3",
        ),
        ({"scaling": torch.zeros(2)}, r"scaling: expected a contiguous CPU Float tensor of shape \[1\]"),
        ({"dropout_p": torch.tensor([0.1])}, "give all three or none"),
        (
            {"packed": torch.zeros(5, 6)},
            r"packed: expected Float of shape \[6, 5\], got Float of shape \[5, 6\]",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_checks_name_the_argument(change: dict, message: str) -> None:
    arguments = {
        "x": torch.zeros(4, 5),
        "weight": torch.zeros(6, 5),
        "bias": None,
        "lora_a": [torch.zeros(2, 5)],
        "lora_b": [torch.zeros(6, 2)],
        "segments": torch.tensor([[0, 4, 0, 0]]),
        "scaling": torch.ones(1),
        "dropout_p": None,
        "dropout_rng": None,
        "layer": None,
        "packed": None,
    }
    OPS.lora_linear(**arguments)
    with pytest.raises(RuntimeError, match=message):
        OPS.lora_linear(**(arguments | change))


def test_bf16_on_a_processor_without_avx512() -> None:
    """oneDNN refuses bf16 there; the product then goes to aten."""
    code = (
        "import torch; from mlora_ext.frozen import base_gemm as gemm; x = torch.randn(256, 64).bfloat16(); "
        "w = torch.randn(64, 64).bfloat16(); "
        "assert torch.equal(gemm.linear(x, w), torch.nn.functional.linear(x, w)); "
        "print(gemm.base_gemm_of(torch.bfloat16)['bfloat16'])"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "aten"), done.stderr


def test_a_library_that_cannot_serve_is_refused() -> None:
    before = gemm.base_gemm_of(torch.float16)
    x, weight = torch.randn(256, 64).half(), torch.randn(65, 64).half()
    refusal = ""
    try:
        gemm.set_base_gemm({"float16": "onednn"})
    except ValueError as error:
        refusal = str(error)
    if gemm.base_gemm_of(torch.float16) == before:
        assert "oneDNN does not serve Half" in refusal
    assert_as_exact(
        gemm.linear(x, weight), torch.nn.functional.linear(x, weight), x.double() @ weight.double().T, "y"
    )
    gemm.set_base_gemm(before)


@pytest.mark.parametrize("how", ["expanded", "columns", "rows"])
def test_gradients_of_adapters_with_unusual_strides(how: str) -> None:
    """A gradient has its parameter's strides only where those are dense."""
    wide = torch.randn(6, 32)
    a = {"expanded": wide[:1, :16].expand(3, 16), "columns": wide[:3, ::2], "rows": wide[::2, :16]}[how]
    b = torch.randn(8, 6)[:, ::2]
    layout = mx.SegmentLayout.from_lengths([5])
    x, weight, dy = torch.randn(5, 16), torch.randn(8, 16), torch.randn(5, 8)
    found = []
    for backend in ("cpu", "reference"):
        leaves = [x.detach().requires_grad_(), a.detach().requires_grad_(), b.detach().requires_grad_()]
        with mx.use_backend(backend):
            y = mx.multi_lora_linear(leaves[0], weight, None, [leaves[1]], [leaves[2]], [2.0], layout)
        found.append(torch.autograd.grad(y, leaves, dy))
    for ours, theirs, name in zip(*found, ("dx", "dA", "dB"), strict=True):
        assert_same_up_to_rounding(ours, theirs, name)
    arguments = (dy, x, weight, [a], [b], torch.randn(5, 3), layout.table(), torch.ones(1))
    torch.library.opcheck(
        torch.ops.mlora_ext.lora_linear_backward.default,
        (*arguments, None, None, None, True, True, True, None),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_frozen_products_on_fake_tensors() -> None:
    with FakeTensorMode():
        x, weight = torch.empty(4, 6, requires_grad=True), torch.empty(5, 6)
        y = frozen_linear(x, PlainWeight.of(weight))
        assert y.shape == (4, 5)
        assert torch.autograd.grad(y.sum(), x)[0].shape == (4, 6)
