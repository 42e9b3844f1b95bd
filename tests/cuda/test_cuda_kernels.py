"""The CUDA kernels' own source on a CPU emulator, against the oracle: values, isolation, determinism."""

from dataclasses import dataclass

import emulated
import pytest
import torch
from cases import Case, check, make
from launches import Factor, Plan, backward, forward

import mlora_ext as mx
from mlora_ext.dropout import philox_mask

pytestmark = pytest.mark.skipif(bool(emulated.missing()), reason=f"the emulator {emulated.missing()}")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIXED = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)]


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    emulated.load()


@dataclass
class Run:
    """One forward and backward of a case by the kernels around plain products with W."""

    y: torch.Tensor
    s: torch.Tensor
    dx: torch.Tensor
    a: Factor
    b: Factor

    def results(self) -> list[torch.Tensor]:
        return [self.y, self.dx, *self.a.gradients(), *(g.t() for g in self.b.gradients())]


def run(case: Case, base: bool = True) -> Run:
    x, weight, bias, lora_a, lora_b, segments, scaling, *drop = case.operator_arguments()
    x = x.detach() if x.stride(1) == 1 else x.detach().contiguous()
    dy = case.dy.reshape(-1, len(weight))
    a, b = Factor(lora_a), Factor([matrix.t() for matrix in lora_b])
    plan = Plan.of(segments, len(x), len(lora_a))
    y, s = forward(x, bias, a, b, plan, scaling, drop)
    dx = backward(dy, x, s, a, b, plan, scaling, drop)
    if base:
        y, dx = torch.addmm(y, x, weight.t()), torch.addmm(dx, dy, weight)
    return Run(y.view(*case.x.shape[:-1], len(weight)), s, dx.view(case.x.shape), a, b)


def check_kernels(case: Case) -> None:
    check(case, run(case).results())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [[1], [15, 2], [17], [33, 64], [65], [128, 8], [129, 3], [200]], ids=str)
def test_any_rank(ranks: list[int], dtype: torch.dtype) -> None:
    check_kernels(make(ranks, [19, 7][: len(ranks)], list(range(len(ranks))), dtype=dtype, d_in=72, p=0.3))


@pytest.mark.parametrize(("dtype", "adapter_dtype"), [*zip(DTYPES, DTYPES, strict=True), *MIXED], ids=str)
def test_several_column_splits(dtype: torch.dtype, adapter_dtype: torch.dtype) -> None:
    check_kernels(
        make([8, 20], [70, 9], [1, 0], dtype=dtype, adapter_dtype=adapter_dtype, d_in=4160, d_out=2056, p=0.1)
    )


@pytest.mark.parametrize(("dtype", "adapter_dtype"), [*zip(DTYPES, DTYPES, strict=True), *MIXED], ids=str)
def test_several_slots(dtype: torch.dtype, adapter_dtype: torch.dtype) -> None:
    """More than 1024 rows of an adapter: partial gradients, summed in their order."""
    lengths = [1100, 30, 40, 2100]
    check_kernels(make([8, 6, 3], lengths, [1, 0, -1, 2], dtype=dtype, adapter_dtype=adapter_dtype, p=0.1))


def test_dropout_differs_by_adapter() -> None:
    check_kernels(make([4, 7, 5], [40, 30, 20], [0, 1, 2], p=[0.0, 0.5, 0.01]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_intermediate(dtype: torch.dtype) -> None:
    """Columns of s beyond the rank and rows without adapter are zero."""
    s = run(make([3, 9], [6, 4, 5], [0, -1, 1], dtype=dtype, p=0.2)).s
    assert (s[:6, 3:] == 0).all()
    assert (s[6:10] == 0).all()


@pytest.mark.parametrize("part", ["dx", "da", "db"])
def test_only_wanted_gradients(part: str) -> None:
    case = make([5, 16], [37, 61], [0, 1], p=0.2)
    x, _, _, lora_a, lora_b, segments, scaling, *drop = case.operator_arguments()
    full = run(case, base=False)
    a, b = Factor(lora_a), Factor([matrix.t() for matrix in lora_b])
    plan = Plan.of(segments, len(x), len(lora_a))
    needs = [part == name for name in ("dx", "da", "db")]
    dx = backward(case.dy, x.detach(), full.s, a, b, plan, scaling, drop, *needs)
    for name, found, expected in (
        ("dx", dx, full.dx), ("da", a.gradient, full.a.gradient), ("db", b.gradient, full.b.gradient)
    ):  # fmt: skip
        if name == part:
            assert torch.equal(found, expected)
        else:
            assert found.isnan().all(), f"{name} was not asked for"


@pytest.mark.parametrize("widest", [33, 130])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_mates_change_no_bit(dtype: torch.dtype, widest: int) -> None:
    """An adapter alone, and with others of larger ranks beside it and between its segments."""
    lengths, adapters = [37, 53, 1100, 9], [0, 1, 0, 2]
    together = make([16, widest, 8], lengths, adapters, dtype=dtype, d_in=192, d_out=136, p=0.1)
    keep = torch.cat([torch.arange(37), torch.arange(90, 1190)])
    alone = object.__new__(Case)
    alone.__dict__.update(together.__dict__)
    alone.x, alone.dy = together.x[keep].detach().clone(), together.dy[keep].clone()
    alone.lora_a, alone.lora_b, alone.scaling = together.lora_a[:1], together.lora_b[:1], together.scaling[:1]
    alone.layout = mx.SegmentLayout.from_lengths([37, 1100], [0, 0])
    drop = together.dropout
    alone.dropout = mx.LoRADropout(drop.p[:1], drop.seeds[:1], drop.step[:1], drop.layer)
    ours, theirs = run(alone, base=False), run(together, base=False)
    assert torch.equal(ours.s, theirs.s[keep, :16])
    assert torch.equal(ours.y, theirs.y[keep])
    assert torch.equal(ours.dx, theirs.dx[keep])
    assert torch.equal(ours.a.gradients()[0], theirs.a.gradients()[0])
    assert torch.equal(ours.b.gradients()[0], theirs.b.gradients()[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_input_same_bits(dtype: torch.dtype) -> None:
    """The emulator runs blocks and threads in another order each time."""
    case = make([5, 16, 70], [37, 1150, 61], [0, 1, 2], dtype=dtype, p=0.1)
    for one, other in zip(run(case).results(), run(case).results(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("where", ["rows", "weights"])
def test_nan_stays_with_its_adapter(where: str, dtype: torch.dtype) -> None:
    case = make([5, 16, 8], [37, 60, 21], [0, 1, 2], p=0.2, dtype=dtype)
    # adapters and rows that border on each other in memory
    case.lora_a = list(torch.randn(29, 40).to(dtype).split([5, 16, 8]))
    case.lora_b = [b.t() for b in torch.randn(29, 24).to(dtype).split([5, 16, 8])]
    case.require_grad()
    clean = run(case)
    with torch.no_grad():
        for tensor in (
            [case.x[37:97], case.dy[37:97]] if where == "rows" else [case.lora_a[1], case.lora_b[1]]
        ):
            tensor.fill_(torch.nan)
    dirty = run(case)
    assert dirty.y[37:97].isnan().any(), "the NaN never arrived"
    for rows in [slice(0, 37), slice(97, 118)]:
        assert torch.equal(clean.y[rows], dirty.y[rows])
        assert torch.equal(clean.dx[rows], dirty.dx[rows])
    for index in (0, 2):
        assert torch.equal(clean.a.gradients()[index], dirty.a.gradients()[index])
        assert torch.equal(clean.b.gradients()[index], dirty.b.gradients()[index])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropped_elements_are_selected_not_multiplied(dtype: torch.dtype) -> None:
    case = make([4], [8], [0], p=0.5, dtype=dtype)
    mask = philox_mask(
        8, 40, p=0.5, seed=case.dropout.seeds[0], step=case.dropout.step[0], layer=case.dropout.layer
    )
    with torch.no_grad():
        case.x[~mask] = torch.inf
    found = run(case, base=False)
    assert found.s.isfinite().all()
    assert found.a.gradient.isfinite().all()
    assert ((found.dx != 0) == mask).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_beyond_a_tensor_is_written_or_used(dtype: torch.dtype) -> None:
    """Rows and columns around x, dy and the factors are NaN."""
    case = make([5, 16], [37, 60], [0, 1], p=0.2, dtype=dtype, d_in=72, d_out=88)

    def inside_nan(tensor: torch.Tensor, shift: int) -> torch.Tensor:
        wide = torch.full((tensor.shape[0] + 2, tensor.shape[1] + 24), torch.nan, dtype=tensor.dtype)
        view = wide[1:-1, shift : shift + tensor.shape[1]]
        return view.copy_(tensor.detach())

    expected = run(case, base=False)
    for shift in (8, 5):
        case.x, case.dy = inside_nan(case.x, shift), inside_nan(case.dy, shift)
        case.lora_a = [inside_nan(a, shift) for a in case.lora_a]
        case.lora_b = [inside_nan(b.t(), shift).t() for b in case.lora_b]
        for one, other in zip(run(case, base=False).results(), expected.results(), strict=True):
            assert torch.equal(one, other), f"shift {shift}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tiles": torch.zeros(9, 3, dtype=torch.int32)}, "tiles: expected 4 columns"),
        (
            {"factor": torch.zeros(3).half()},
            "factor: expected dtype Float .that of the rows. or Float",
        ),
        ({"scaling": torch.ones(1).double()}, "scaling: expected a contiguous Float tensor"),
        ({"dropout_p": torch.zeros(1)}, "give all three or none"),
        ({"out": torch.zeros(3, 2)}, "out: expected 1 parts of 4 rows"),
        ({"rows": torch.zeros(5, 4).t()}, "rows: expected a matrix of dense rows"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_checks_name_the_argument(change: dict, message: str) -> None:
    arguments = {
        "rows": torch.zeros(4, 5),
        "factor": torch.zeros(2, 5),
        "table": torch.tensor([[0, 5, 1, 2, 0, 5, 1, 0]]),
        "tiles": torch.tensor([[0, 4, 0, 0]], dtype=torch.int32),
        "scaling": torch.ones(1),
        "dropout_p": None,
        "dropout_rng": None,
        "layer": None,
        "out": torch.zeros(4, 2),
    }
    torch.ops.mlora_ext.cuda_shrink(**arguments)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.mlora_ext.cuda_shrink(**(arguments | change))
