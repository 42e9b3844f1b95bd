"""The compiled AdamW update beside PyTorch's own."""

import math
from collections.abc import Iterator

import pytest
import torch

from mlora_ext import _C

ADAMW = torch.ops.mlora_ext.adamw
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
    options = {**OPTIONS, "step": step, "scale": 1.0, "threads": 0, **more}
    return ADAMW(gradient, *state, copy, *options.values())


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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gradient": torch.zeros(4, dtype=torch.float64)}, "gradient: expected a contiguous Float"),
        ({"parameter": torch.zeros(4).bfloat16()}, "parameter: expected a contiguous Float tensor"),
        ({"first": torch.zeros(3)}, r"first: expected 4 numbers \(as many as the gradient has\), got 3"),
        ({"second": torch.zeros(8)[::2]}, "second: expected a contiguous Float tensor"),
        ({"copy": torch.zeros(5)}, "copy: expected .* 4 numbers, got Float of 5"),
        ({"step": 0}, "step: expected at least 1, got 0"),
        ({"threads": -1}, "threads: expected at least 0"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict, message: str) -> None:
    tensors = {name: torch.zeros(4) for name in ("gradient", "parameter", "first", "second")}
    arguments = {**tensors, "copy": None, **OPTIONS, "step": 1, "scale": 1.0, "threads": 0, **wrong}
    with pytest.raises(RuntimeError, match=message):
        ADAMW(*arguments.values())
