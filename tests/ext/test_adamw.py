"""The compiled AdamW update of many tensors at once, beside PyTorch's own."""

import math
from collections.abc import Iterator

import pytest
import torch

from mlora_ext import _C

ADAMW, SQUARES = torch.ops.mlora_ext.adamw, torch.ops.mlora_ext.squares
OPTIONS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=_C.build_info()["cpu_isas"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = torch.ops.mlora_ext.cpu_isa()
    try:
        torch.ops.mlora_ext.use_cpu_isa(request.param)
    except RuntimeError as error:
        pytest.skip(str(error))
    yield request.param
    torch.ops.mlora_ext.use_cpu_isa(before)


def states(count: int) -> list[torch.Tensor]:
    """Parameter, first and second moment."""
    return [torch.randn(count), torch.zeros(count), torch.zeros(count)]


def update(gradient: torch.Tensor, state: list[torch.Tensor], step: int, copy=None, **more) -> float:
    return update_all([gradient], [[one] for one in state], step, [] if copy is None else [copy], **more)


def update_all(gradients: list[torch.Tensor], state: list[list[torch.Tensor]], step: int, copies=(), **more):
    """`state`: parameters, first and second moments."""
    options = {**OPTIONS, "step": step, "scale": 1.0, "clear": False, "threads": 0, **more}
    return ADAMW(gradients, *state, list(copies), *options.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 7, 64, 70001])
def test_twenty_updates_are_those_of_torch(isa: str, dtype: torch.dtype, count: int) -> None:
    state = states(count)
    copy = torch.empty(count, dtype=torch.bfloat16)
    expected = torch.nn.Parameter(state[0].clone())
    betas = OPTIONS["beta1"], OPTIONS["beta2"]
    optimizer = torch.optim.AdamW([expected], lr=1e-3, betas=betas, eps=1e-8, weight_decay=0.1)
    for step in range(1, 21):
        gradient = torch.randn(count).to(dtype)
        expected.grad = gradient.float() * 0.5
        optimizer.step()
        update(gradient, state, step, copy, scale=0.5)
        torch.testing.assert_close(state[0], expected.detach(), atol=1e-6, rtol=1e-6)
        assert torch.equal(copy, state[0].bfloat16())
    moments = optimizer.state[expected]
    torch.testing.assert_close(state[1], moments["exp_avg"], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(state[2], moments["exp_avg_sq"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("copy_dtype", [None, *DTYPES], ids=str)
def test_threads_pieces_and_copies_change_no_bit(isa: str, copy_dtype: torch.dtype | None) -> None:
    """An update of a tensor in pieces is that of the whole, so a file's tensors may be cut anywhere."""
    count, gradient = 100_003, torch.randn(100_003).bfloat16()
    whole = states(count)
    whole[2] = torch.rand(count)
    pieces, one_thread = ([one.clone() for one in whole] for _ in range(2))
    copy = None if copy_dtype is None else torch.empty(count, dtype=copy_dtype)
    assert update(gradient, whole, 3, copy) == update(gradient, one_thread, 3, threads=1)
    for begin, end in ((0, 16), (16, 50_001), (50_001, count)):
        update(gradient[begin:end], [one[begin:end] for one in pieces], 3)
    for one, other, third in zip(whole, pieces, one_thread, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)
    assert copy is None or torch.equal(copy, whole[0].to(copy_dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 7, 64, 70001])
def test_it_returns_the_sum_of_the_squares(isa: str, dtype: torch.dtype, count: int) -> None:
    gradient = torch.randn(count).to(dtype)
    found = update(gradient, states(count), 1, scale=0.5)
    assert found == pytest.approx(gradient.double().square().sum().item(), rel=1e-5)


def test_a_nan_stays_where_it_is(isa: str) -> None:
    state, gradient = states(100), torch.randn(100)
    gradient[33] = torch.nan
    assert math.isnan(update(gradient, state, 1))
    for one in state:
        assert one.isnan().nonzero().tolist() == [[33]]


def matrices(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    """As a bank has them: A contiguous, B a transposed view."""
    return [torch.randn(d, r).t() if r > d else torch.randn(r, d) for r, d in shapes]


@pytest.mark.parametrize("threads", [1, 2])
def test_many_tensors_at_once_are_each_alone(isa: str, threads: int) -> None:
    shapes = [(8, 33), (300, 8), (8, 5000), (1, 1), (70000, 3), (8, 0)]
    parameters, first, second = ([p.clone() for p in matrices(*shapes)] for _ in range(3))
    second = [p.abs() for p in second]
    assert [p.is_contiguous() for p in parameters] == [p.is_contiguous() for p in second]
    gradients = [g.to(p.dtype) for g, p in zip(matrices(*shapes), parameters, strict=True)]
    gradients[2] = gradients[2].bfloat16()
    alone = [[t.clone() for t in some] for some in (parameters, first, second)]
    squares = [update_all([g], [[some[i]] for some in alone], 5, scale=0.3) for i, g in enumerate(gradients)]
    total = update_all(gradients, [parameters, first, second], 5, scale=0.3, threads=threads)
    for some, others in zip((parameters, first, second), alone, strict=True):
        assert all(map(torch.equal, some, others))
    assert total == pytest.approx(sum(squares), rel=1e-12)
    assert SQUARES(gradients, threads) == pytest.approx(total, rel=1e-6)
    assert SQUARES(gradients, 1) == SQUARES(gradients, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 7, 64, 70001])
def test_it_clears_gradients_and_changes_nothing_else(isa: str, dtype: torch.dtype, count: int) -> None:
    kept = states(count)
    cleared = [one.clone() for one in kept]
    gradient = torch.randn(count + 1).to(dtype)
    beside = gradient[-1].item()
    update(gradient[:-1], kept, 1)
    update(gradient[:-1], cleared, 1, clear=True)
    assert all(map(torch.equal, kept, cleared))
    assert not gradient[:-1].any()
    assert gradient[-1].item() == beside


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 7, 64, 70001])
def test_squares(isa: str, dtype: torch.dtype, count: int) -> None:
    numbers = torch.randn(count).to(dtype)
    assert SQUARES([numbers], 0) == pytest.approx(numbers.double().square().sum().item(), rel=1e-5)


def test_squares_tell_of_what_is_not_finite(isa: str) -> None:
    numbers = torch.randn(1000)
    numbers[999] = torch.inf
    assert SQUARES([torch.randn(5), numbers], 0) == math.inf
    numbers[3] = torch.nan
    assert math.isnan(SQUARES([numbers], 0))
    with pytest.raises(RuntimeError, match=r"tensors\[1\]: expected a dense CPU"):
        SQUARES([torch.zeros(4), torch.zeros(8)[::2]], 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gradients": [torch.zeros(4, dtype=torch.float64)]}, r"gradients\[0\]: expected a dense CPU Float"),
        (
            {"parameters": [torch.zeros(4).bfloat16()]},
            r"parameters\[0\]: expected a CPU Float .* BFloat16",
        ),
        ({"first": [torch.zeros(3)]}, r"first\[0\]: expected shape \[4\] .* got \[3\]"),
        ({"first": []}, r"first: expected 1 \(one for each gradient\), got 0"),
        ({"second": [torch.zeros(8)[::2]]}, r"second\[0\]: .* the strides of the gradient"),
        ({"second": [torch.zeros(2, 2)]}, r"second\[0\]: expected shape \[4\] .* got \[2, 2\]"),
        ({"copies": [torch.zeros(4, dtype=torch.float64)]}, r"copies\[0\]: expected a CPU Float"),
        ({"copies": [torch.zeros(5)]}, r"copies\[0\]: expected shape \[4\] .* got \[5\]"),
        ({"copies": [torch.zeros(4)] * 2}, r"copies: expected none or 1 .*, got 2"),
        ({"step": 0}, "step: expected at least 1, got 0"),
        ({"threads": -1}, "threads: expected at least 0"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict, message: str) -> None:
    tensors = {name: [torch.zeros(4)] for name in ("gradients", "parameters", "first", "second")}
    more = {"step": 1, "scale": 1.0, "clear": False, "threads": 0}
    arguments = {**tensors, "copies": [], **OPTIONS, **more, **wrong}
    with pytest.raises(RuntimeError, match=message):
        ADAMW(*arguments.values())


def test_matrices_need_the_strides_of_their_gradient() -> None:
    """Numbers are paired by their place in memory."""
    rows, columns = torch.zeros(3, 4), torch.zeros(4, 3).t()
    with pytest.raises(RuntimeError, match=r"first\[0\]: .* the strides of the gradient"):
        update_all([columns], [[columns.clone()], [rows], [columns.clone()]], 1)
    with pytest.raises(RuntimeError, match=r"parameters\[0\]: .* the strides of the gradient"):
        update_all([rows], [[columns], [rows], [rows]], 1)
