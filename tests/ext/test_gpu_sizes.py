"""The GPU backends where sums are cut: many columns, many rows, large ranks; and adapters of mixed dtypes."""

import gc
from dataclasses import replace

import pytest
import torch
from backends import BACKENDS, by_dtype, fixture_of
from cases import Case, assert_right, make
from tolerances import assert_as_exact, assert_same_up_to_rounding

import mlora_ext as mx
from mlora_ext.backends import run
from mlora_ext.backends.factors import factors_of, one_dtype
from mlora_ext.backends.interface import Layer
from mlora_ext.backends.plan import SPLIT_TILES, TILE_ROWS
from mlora_ext.frozen.plain import PlainWeight
from mlora_ext.ops import registration

GPU_BACKENDS = [backend for backend in BACKENDS if backend != "cpu"]
DTYPES = [torch.float32, torch.bfloat16]


backend = fixture_of(GPU_BACKENDS)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_no_integer_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of counters and tables: Triton's interpreter asserts it at each sum and product where it debugs.

    Addresses in matrices of more than 2**31 numbers are not reached.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, debug=True, sanitize_overflow=True))
    assert_right(make([5, 17], [9, 70, 6], [0, -1, 1], d_in=72, d_out=56, dtype=torch.bfloat16, p=0.2))


def test_several_column_splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over d_in in three parts, over d_out in four; rows of the base between.

    Triton's interpreter is slow: there a part has fewer columns.
    """
    columns = 2048
    if request.node.callspec.params["backend"] == "triton":
        columns = 128
        monkeypatch.setattr("mlora_ext.backends.triton.operator.COLUMN_SPLIT", columns)
    how = {"ranks": [5, 17], "lengths": [9, 4, 6], "adapters": [0, -1, 1], "p": 0.1}
    assert_right(make(**how, d_in=2 * columns + 72, d_out=40, dtype=torch.bfloat16))
    assert_right(make(**how, d_in=40, d_out=3 * columns + 8))


@pytest.mark.parametrize(
    ("backend", "dtype"), by_dtype(GPU_BACKENDS, DTYPES, torch.float32), indirect=["backend"]
)
def test_several_splits_of_rows(dtype: torch.dtype) -> None:
    """One adapter with three runs of tiles, one with one, one without rows; partial sums in order."""
    rows = SPLIT_TILES * TILE_ROWS
    lengths = [rows + 5, 100, rows + 64, 3]
    assert_right(make([6, 20, 3], lengths, [0, 1, 0, -1], d_in=24, d_out=40, dtype=dtype, p=0.1))


@pytest.mark.parametrize("rank", [16, 33, 64, 65, 130, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_at_the_edges_of_buckets_and_panels(rank: int, dtype: torch.dtype) -> None:
    """In Triton's interpreter each rank in one dtype; nightly in both."""
    order = [0, 1] if dtype == torch.bfloat16 else [1, 0]
    assert_right(make([rank, 3], [9, 70], order, d_in=72, d_out=56, dtype=dtype, p=0.2))


@pytest.mark.parametrize(
    ("backend", "dtype"), by_dtype(GPU_BACKENDS, DTYPES, torch.bfloat16), indirect=["backend"]
)
def test_a_large_batch_mate_changes_no_bit(dtype: torch.dtype) -> None:
    """An adapter of rank 4 beside one of rank 130, which needs other blocks and several panels."""
    together = make([4, 130], [70, 20], [0, 1], d_in=72, d_out=56, dtype=dtype, p=0.2)
    alone = object.__new__(Case)
    alone.__dict__.update(together.__dict__)
    alone.x, alone.dy = together.x[:70].detach().clone().requires_grad_(), together.dy[:70]
    alone.lora_a, alone.lora_b = together.lora_a[:1], together.lora_b[:1]
    alone.scaling, alone.layout = together.scaling[:1], mx.SegmentLayout.from_lengths([70])
    drop = together.dropout
    alone.dropout = mx.LoRADropout(drop.p[:1], drop.seeds[:1], drop.step[:1], drop.layer)
    ours, theirs = alone.run(), together.run()
    assert torch.equal(ours[2], theirs[2]), "dA"
    assert torch.equal(ours[3], theirs[4]), "dB"


@pytest.mark.parametrize("wide", [0, 1, 2])
def test_adapters_of_two_dtypes(wide: int) -> None:
    case = make([4, 7, 5], [6, 5, 9], [0, 1, 2], dtype=torch.bfloat16, p=0.2)
    for matrices in (case.lora_a, case.lora_b):
        matrices[wide] = matrices[wide].detach().float().requires_grad_()
    results = case.run()
    dtypes = [torch.float32 if index == wide else torch.bfloat16 for index in range(3)]
    assert [g.dtype for g in results[2:]] == dtypes * 2
    plain, oracle = case.to(torch.bfloat16).reference(), case.to(torch.float64).reference()
    for what, result, same, exact in zip(case.labels(), results, plain, oracle, strict=True):
        assert_as_exact(result, same, exact, what)


@pytest.mark.parametrize("how", ["expanded", "columns", "rows", "transposed"])
def test_adapters_with_unusual_strides(how: str) -> None:
    wide = torch.randn(6, 32)
    views = {"expanded": wide[:1, :16].expand(3, 16), "columns": wide[:3, ::2], "rows": wide[::2, :16],
             "transposed": wide[:, :3].repeat(3, 1)[:16].t()}  # fmt: skip
    case = make([3], [70], [0], d_in=16, d_out=8, p=0.2)
    case.lora_a = [views[how].detach().requires_grad_()]
    case.lora_b = [torch.randn(8, 6)[:, ::2].detach().requires_grad_()]
    assert_right(case)


def test_infinite_rows_beside_a_larger_rank() -> None:
    """An infinite element of x makes inf of an adapter's rows, alone and beside a rank that needs more."""
    together = make([4, 40], [6, 5], [0, 1], p=None)
    with torch.no_grad():
        together.x[2] = torch.inf
        together.lora_a[0].abs_()
        together.lora_b[0].abs_()
    y = mx.multi_lora_linear(*together.arguments())
    with mx.use_backend("reference"):
        expected = mx.multi_lora_linear(*together.arguments())
    assert torch.equal(y[2].isnan(), expected[2].isnan())


@pytest.mark.parametrize("wide", [0, 1])
def test_a_graphs_kernel_with_adapters_of_two_dtypes(
    backend: str, monkeypatch: pytest.MonkeyPatch, wide: int
) -> None:
    """What a compiled graph calls on a GPU gives gradients in the adapters' own dtypes."""
    monkeypatch.setattr(registration, "_of_device", lambda x: backend)
    case = make([4, 7], [6, 5], [0, 1], dtype=torch.bfloat16, p=0.2)
    for matrices in (case.lora_a, case.lora_b):
        matrices[wide] = matrices[wide].detach().float().requires_grad_()
    x, weight, bias, lora_a, lora_b, *plan = case.operator_arguments()
    with torch.no_grad():
        y, s = registration._cuda_forward(x, weight, bias, lora_a, lora_b, *plan, None)
        assert (s.shape, s.is_contiguous()) == ((11, 7), True), "as the fake kernel says"
        dx, da, db = registration._cuda_backward(
            case.dy, x, weight, lora_a, lora_b, s, *plan, True, True, True, None
        )
    assert [g.dtype for g in da] == [a.dtype for a in lora_a]
    assert [g.stride() for g in db] == [b.stride() for b in lora_b]
    for found, expected in zip([y, dx, *da, *db], case.run(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_converted_matrices_live_as_long_as_their_table(transposed: bool) -> None:
    """The kernels read them by address, and nobody else holds them."""
    matrices = [torch.randn(5, 8), torch.randn(3, 8).bfloat16(), torch.randn(4, 8).bfloat16()]
    if transposed:
        matrices = [matrix.t() for matrix in matrices]
    described = factors_of(one_dtype(matrices), transposed=transposed)
    size = described.first.element_size()
    addresses = [described.first.data_ptr() + size * row[0] for row in described.table.tolist()]
    gc.collect()
    assert addresses == [matrix.data_ptr() for matrix in described.matrices]
    for found, matrix in zip(described.matrices, matrices, strict=True):
        assert torch.equal(found, matrix.float())


def test_segments_on_another_device_are_refused(backend: str) -> None:
    case = make([4], [6], [0])
    x, weight, bias, lora_a, lora_b, segments, scaling, *_ = case.operator_arguments()
    layer, plan = (
        Layer(PlainWeight.of(weight), weight, bias),
        (segments.to("meta"), scaling, None, None, None),
    )
    with pytest.raises(ValueError, match=r"segments: expected device .* \(that of x\), got meta"):
        run.forward(backend, x, [layer], lora_a, lora_b, plan)


def test_layers_without_adapters(backend: str) -> None:
    """The frozen products alone, of one x; dx only where it is wanted."""
    x, weight, dy = torch.randn(5, 4), torch.randn(3, 4), torch.randn(5, 3)
    layers = [Layer(PlainWeight.of(w), w) for w in (weight, 2 * weight)]
    table = mx.SegmentLayout.from_lengths([5], [-1]).table(x.device)
    plan = (table, torch.empty(0), None, None, None)
    ys, saved = run.forward(backend, x, layers, [], [], plan)
    assert_same_up_to_rounding(ys[1], 2 * (x @ weight.t()), "y")
    for need_dx in (True, False):
        dx, da, db = run.backward(backend, [dy, dy], x, layers, [], [], saved, plan, (need_dx, True, True))
        assert (da, db) == ([], [])
        if need_dx:
            assert_same_up_to_rounding(dx, 3 * (dy @ weight), "dx")
        else:
            assert dx is None
