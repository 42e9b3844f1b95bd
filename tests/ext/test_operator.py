"""The compiled operator against the oracle: values, gradients, isolation, determinism, autograd, compile."""

import re
from collections.abc import Iterator

import pytest
import torch
from backends import BACKENDS, by_dtype, serving
from cases import CASES, Case, alone_of, assert_right, make
from tolerances import assert_as_exact, in_other_orders
from torch.utils.checkpoint import checkpoint

import mlora_ext as mx
from mlora_ext.backends import run
from mlora_ext.backends.interface import Layer
from mlora_ext.backends.selection import Backend
from mlora_ext.frozen.plain import PlainWeight
from mlora_ext.ops.functional import lora_linear_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIXED = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)]
ONE_ON_TRITON = pytest.mark.parametrize(
    ("backend", "dtype"), by_dtype(BACKENDS, DTYPES, torch.float16), indirect=["backend"]
)
CPU_ONLY = pytest.mark.parametrize("backend", ["cpu"], indirect=True)


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    with serving(request.param, monkeypatch) as name:
        # full of NaN in every test: a test of its own, as on other backends, would take long here
        torch.use_deterministic_algorithms(request.param == "triton")
        yield name


@pytest.mark.parametrize("p", [None, 0.2], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dtype: torch.dtype, p: float | None) -> None:
    assert_right(CASES[name](dtype=dtype, p=p))


@pytest.mark.parametrize("p", [None, 0.2], ids=["no dropout", "dropout"])
@pytest.mark.parametrize(("dtype", "adapter_dtype"), MIXED, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_fp32_adapters(
    name: str, dtype: torch.dtype, adapter_dtype: torch.dtype, p: float | None
) -> None:
    assert_right(CASES[name](dtype=dtype, adapter_dtype=adapter_dtype, p=p))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_adapters_of_another_dtype_are_converted(dtype: torch.dtype) -> None:
    """Adapters that are neither of x's dtype nor fp32: used in x's dtype, gradients in their own."""
    case = make([4, 7], [6, 5], [0, 1], adapter_dtype=dtype, p=0.2)
    same = case.to(torch.float32)
    for what, result, expected in zip(case.labels(), case.run(), same.run(), strict=True):
        own = torch.float32 if what in ("y", "dx") else dtype
        assert result.dtype == own
        assert torch.equal(result, expected.to(own)), what


def test_dropout_differs_by_adapter() -> None:
    assert_right(make([4, 7, 5], [40, 30, 20], [0, 1, 2], p=[0.0, 0.5, 0.01]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_intermediate(backend: Backend, dtype: torch.dtype) -> None:
    """`s` holds the scaled shrink; columns beyond the rank and rows without adapter are zero."""
    case = make([3, 9], [6, 4, 5], [0, -1, 1], dtype=dtype, p=0.2)
    arguments = case.operator_arguments()
    s = low_rank(backend, case)[0]
    _, plain = mx.ops.reference.lora_linear(*arguments)
    _, oracle = mx.ops.reference.lora_linear(*case.to(torch.float64).operator_arguments())
    assert_as_exact(s[:, :9], plain.detach(), oracle.detach(), "s")
    assert (s[:, 9:] == 0).all(), "a backend may pad"
    assert (s[:6, 3:] == 0).all()
    assert (s[6:10] == 0).all()


@ONE_ON_TRITON
def test_batch_mates_change_no_bit(backend: Backend, dtype: torch.dtype) -> None:
    """s, dA and dB of an adapter are bit-equal alone and beside others, wherever its rows lie."""
    together = make([5, 16, 8], [37, 150, 61], [0, 1, 2], dtype=dtype, d_in=192, d_out=136, p=0.1)
    results = low_rank(backend, together)
    for index, rows in enumerate([slice(0, 37), slice(37, 187), slice(187, 248)]):
        alone = alone_of(together, rows, [rows.stop - rows.start], index)
        ours, theirs = of_adapter(low_rank(backend, alone), 0), of_adapter(results, index, rows)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)


@ONE_ON_TRITON
def test_batch_mates_between_segments_change_no_bit(backend: Backend, dtype: torch.dtype) -> None:
    """The sum over several segments of an adapter is the same with and without others between them."""
    beside = make([8, 8], [37, 53, 70, 9], [0, 1, 0, 1], dtype=dtype, d_in=192, d_out=136, p=0.1)
    keep = torch.cat([torch.arange(37), torch.arange(90, 160)])
    alone = alone_of(beside, keep, [37, 70])
    ours, theirs = (of_adapter(low_rank(backend, case), 0) for case in (alone, beside))
    assert torch.equal(ours[0], theirs[0][keep])
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        assert torch.equal(one, other)


LowRank = tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]


def low_rank(backend: Backend, case: Case) -> LowRank:
    """s, dA and dB of all adapters."""
    x, weight, bias, lora_a, lora_b, *plan = case.operator_arguments()
    layers = [Layer(PlainWeight.of(weight), weight, bias)]
    with torch.no_grad():
        _, saved = run.forward(backend, x, layers, lora_a, lora_b, tuple(plan))
        _, da, db = run.backward(
            backend, [case.dy], x, layers, lora_a, lora_b, saved, tuple(plan), (True, True, True)
        )
    return saved[0].reshape(len(x), -1), da, db


def of_adapter(results: LowRank, adapter: int, rows: slice = slice(None)) -> list[torch.Tensor]:
    s, da, db = results
    return [s[rows, : da[adapter].shape[0]], da[adapter], db[adapter]]


@pytest.mark.parametrize("where", ["rows", "weights"])
@pytest.mark.parametrize("p", [None, 0.2], ids=["no dropout", "dropout"])
def test_nan_stays_with_its_adapter(where: str, p: float | None) -> None:
    case = make([5, 16, 8], [37, 60, 21], [0, 1, 2], p=p)
    clean = case.run()
    with torch.no_grad():
        for tensor in [case.x[37:97]] if where == "rows" else [case.lora_a[1], case.lora_b[1]]:
            tensor.fill_(torch.nan)
    dirty = case.run()
    assert dirty[0][37:97].isnan().any(), "the NaN never arrived"
    others = [slice(0, 37), slice(97, 118)]
    for rows in others:
        assert torch.equal(clean[0][rows], dirty[0][rows])
        assert torch.equal(clean[1][rows], dirty[1][rows])
    for index in (2, 4, 5, 7):
        assert torch.equal(clean[index], dirty[index]), case.labels()[index]


def test_dropped_elements_are_selected_not_multiplied(backend: Backend) -> None:
    """An infinite element of x that dropout drops leaves the low-rank result finite."""
    case = make([4], [8], [0], p=0.5)
    mask = mx.ops.dropout.philox_mask(
        8, 40, p=0.5, seed=case.dropout.seeds[0], step=case.dropout.step[0], layer=case.dropout.layer
    ).to(case.x.device)
    with torch.no_grad():
        case.x[~mask] = torch.inf
    s = low_rank(backend, case)[0]
    assert s.isfinite().all()


@ONE_ON_TRITON
def test_same_input_same_bits(dtype: torch.dtype) -> None:
    case = make([5, 16, 8], [37, 150, 61], [0, 1, 2], dtype=dtype, d_in=192, d_out=136, p=0.1)
    for one, other in zip(case.run(), case.run(), strict=True):
        assert torch.equal(one, other)


@CPU_ONLY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_thread_count_changes_no_bit(backend: Backend, dtype: torch.dtype) -> None:
    case = make([5, 16, 8], [37, 350, 161], [0, 1, 2], dtype=dtype, d_in=192, d_out=136, p=0.1)
    threads = torch.get_num_threads()
    s, da, db = low_rank(backend, case)
    torch.set_num_threads(threads + 2)
    try:
        again, *gradients = low_rank(backend, case)
    finally:
        torch.set_num_threads(threads)
    for one, other in zip([s, *da, *db], [again, *gradients[0], *gradients[1]], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", [one for one in BACKENDS if one != "triton"], indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_uninitialised_memory_is_never_read(name: str) -> None:
    """With every `torch.empty` full of NaN, results keep their bits."""
    case = CASES[name](p=0.2)
    expected = case.run()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    for one, other in zip(expected, case.run(), strict=True):
        assert torch.equal(one, other)


@CPU_ONLY
@pytest.mark.parametrize("p", [None, 0.2], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype, p: float | None) -> None:
    case = make([4, 7], [6, 0, 5, 3], [0, 1, -1, 1], dtype=dtype, p=p)
    torch.library.opcheck(torch.ops.mlora_ext.lora_linear.default, (*case.operator_arguments(), None))
    x, weight, _, lora_a, lora_b, *plan = (
        a.detach() if isinstance(a, torch.Tensor) else a for a in case.operator_arguments()
    )
    lora_a, lora_b = [a.detach() for a in lora_a], [b.detach() for b in lora_b]
    s = torch.randn(len(x), 7).to(dtype)
    for needs in [(True, True, True), (False, True, False), (True, False, True)]:
        torch.library.opcheck(
            torch.ops.mlora_ext.lora_linear_backward.default,
            (case.dy, x, weight, lora_a, lora_b, s, *plan, *needs, None),
        )


@pytest.mark.parametrize("frozen", ["x", "lora_a", "lora_b", "adapters", "one adapter"])
def test_only_wanted_gradients(frozen: str) -> None:
    case = make([4, 7], [6, 5], [0, 1])
    full = case.run()
    off = {
        "x": [case.x], "lora_a": case.lora_a, "lora_b": case.lora_b,
        "adapters": case.lora_a + case.lora_b, "one adapter": [case.lora_a[0], case.lora_b[0]],
    }[frozen]  # fmt: skip
    for tensor in off:
        tensor.requires_grad_(False)
    leaves = [case.x, *case.lora_a, *case.lora_b]
    mx.multi_lora_linear(*case.arguments()).backward(case.dy)
    for leaf, expected in zip(leaves, full[1:], strict=True):
        if leaf.requires_grad:
            assert torch.equal(leaf.grad, expected)
        else:
            assert leaf.grad is None


def test_double_use_in_one_graph() -> None:
    case = make([4, 7], [6, 5], [0, 1], d_in=24, d_out=24, p=0.2)

    def twice(function, case: Case) -> list[torch.Tensor]:
        y = function(case, function(case, case.x))
        return case.gradients(y)

    def ours(case: Case, x: torch.Tensor) -> torch.Tensor:
        return mx.multi_lora_linear(x, *case.arguments()[1:])

    def plain(case: Case, x: torch.Tensor) -> torch.Tensor:
        return mx.ops.reference.lora_linear(x, *case.operator_arguments()[1:])[0]

    exact = case.to(torch.float64)
    for what, result, same, oracle in zip(
        case.labels()[1:], twice(ours, case), twice(plain, case), twice(plain, exact), strict=True
    ):
        assert_as_exact(result, same, oracle, what)


def test_changed_x_is_noticed() -> None:
    """x itself is saved: writing to it before backward is an error, not a wrong gradient."""
    case = make([4], [6], [0])
    x = case.x * 1
    y = mx.multi_lora_linear(x, *case.arguments()[1:])
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(case.dy)


@pytest.mark.parametrize("name", ["lora_a[0]", "lora_b[1]", "dropout_rng"])
def test_changed_operands_are_noticed(name: str) -> None:
    """An optimizer step, or the next step's masks, between forward and backward."""
    case = make([4, 3], [6, 5], [0, 1])
    device = case.x.device
    p, rng, layer = mx.LoRADropout(p=[0.1, 0.1], seeds=[1, 2]).tensors(device)
    operands = {"lora_a[0]": case.lora_a[0], "lora_b[1]": case.lora_b[1], "dropout_rng": rng}
    plan = (case.layout.table(device), torch.ones(2), p, rng, layer)
    y = lora_linear_rows(case.x, PlainWeight.of(case.weight), None, case.lora_a, case.lora_b, *plan)
    with torch.no_grad():
        operands[name].add_(1)
    with pytest.raises(
        RuntimeError, match=f"^{re.escape(name)}: was changed in place between forward and backward"
    ):
        y.backward(case.dy)


def test_backward_leaves_its_inputs_alone() -> None:
    case = make([4, 7], [6, 5], [0, 1], d_in=24, d_out=24, p=0.2)
    kept = [case.x.detach().clone(), case.dy.clone()]
    case.run()
    assert torch.equal(case.x, kept[0])
    assert torch.equal(case.dy, kept[1])


def test_expanded_gradient() -> None:
    """`sum().backward()` sends a gradient with strides of zero: all rows of a dB are the same few numbers."""
    case = make([4, 7], [6, 5], [0, 1])
    case.dy = torch.ones(()).expand(11, 24)
    expected = case.to(torch.float64).reference()
    draws = in_other_orders(case.to(torch.float32).reference)
    for what, result, same, oracle in zip(case.labels(), case.run(), draws, expected, strict=True):
        assert_as_exact(result, same, oracle, what)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool) -> None:
    case = make([4, 7], [6, 5], [0, 1], p=0.3)
    expected = case.run()
    y = checkpoint(mx.multi_lora_linear, *case.arguments(), use_reentrant=reentrant)
    y.backward(case.dy)
    for leaf, gradient in zip([case.x, *case.lora_a, *case.lora_b], expected[1:], strict=True):
        assert torch.equal(leaf.grad, gradient)


@CPU_ONLY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compile(dtype: torch.dtype) -> None:
    case = make([4, 7], [6, 5], [0, 1], dtype=dtype, p=0.3)
    expected = case.run()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(x: torch.Tensor, lora_a: list, lora_b: list) -> torch.Tensor:
        return mx.ops.functional.lora_linear_rows(x * 1, PlainWeight.of(weight), bias, lora_a, lora_b, *plan)

    x, weight, bias, lora_a, lora_b, *plan = case.operator_arguments()
    y = function(x, lora_a, lora_b)
    for one, other in zip([y.detach(), *case.gradients(y)], expected, strict=True):
        assert torch.equal(one, other)


@CPU_ONLY
def test_autocast() -> None:
    case = make([4, 7], [6, 5], [0, 1], p=0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = case.run()
    assert results[0].dtype == torch.bfloat16
    assert {g.dtype for g in results[1:]} == {torch.float32}
    half = case.to(torch.bfloat16).reference()
    case.dy = case.dy.bfloat16()
    oracle = case.to(torch.float64).reference()
    for what, result, same, exact in zip(case.labels(), results, half, oracle, strict=True):
        assert_as_exact(result, same, exact, what)


def test_inference_mode_before_training() -> None:
    """A layout and a dropout that were used under inference mode first serve a training step."""
    case = make([4, 7], [9, 6], [0, 1], p=0.2)
    with torch.inference_mode():
        mx.multi_lora_linear(*case.arguments())
    assert_right(case)


def test_frozen_adapters_made_in_inference_mode() -> None:
    case = make([4, 7], [6, 5], [0, 1])
    with torch.inference_mode():
        frozen = [t.detach().clone() for t in (case.lora_a[0], case.lora_b[0])]
    expected = case.run()
    case.lora_a[0], case.lora_b[0] = frozen
    y = mx.multi_lora_linear(*case.arguments())
    (dx,) = torch.autograd.grad(y, case.x, case.dy)
    assert torch.equal(y, expected[0])
    assert torch.equal(dx, expected[1])


def test_no_grad_needs_no_graph() -> None:
    case = make([4, 7], [6, 5], [0, 1])
    with torch.no_grad():
        y = mx.multi_lora_linear(*case.arguments())
    assert torch.equal(y, case.run()[0])
    with torch.inference_mode():
        assert torch.equal(mx.multi_lora_linear(*case.arguments()), y)


@CPU_ONLY
def test_refuses_what_it_cannot_serve() -> None:
    case = make([4], [6], [0]).to(torch.float64)
    with pytest.raises(ValueError, match=r"backend 'cpu' serves .* x is float64"):
        mx.multi_lora_linear(*case.arguments())
