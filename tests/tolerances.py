"""The one tolerance policy: as exact as plain PyTorch in the same dtype, against an fp64 oracle.

`err(result, oracle) <= 2 * err(plain, oracle) + tiny`, for the root mean square over all elements and for the
largest one, which shows a single wrong one. `tiny` covers what plain PyTorch gets exactly by chance in a
small tensor. Rounding the result: a quarter of the dtype's epsilon for the root mean square, one epsilon for
the largest element. The order of fp32 sums: one fp32 epsilon.

Plain PyTorch's error is itself one draw: in fp32 the few sums of a small tensor can all be nearly right in
one order of summation. Of 48,000 comparisons of one-row segments (the CUDA kernels, emulated) 19 failed by
that. So `in_other_orders` draws fp32 results several times, with the terms of every matrix product in
another order, and the largest error counts. Few orders explain little where all elements of a result share a
few sums, as in the gradients of an adapter of rank 1 with five rows: of 18,000 comparisons of right results
one failed with 4 orders. So a result that is beyond them is compared with `MOST_DRAWS` orders: of 80,800
none failed. In 16 bits rounding the result decides, which no order changes. Of one draw the largest error
has a heavy tail: with 2 one in 1,800 comparisons of right results failed, by 5%, so there its factor is 4.
Later layers of whole models amplify the rounding of earlier ones differently in each order, so for their
results both factors are 4: of 29,600 results of 800 models (`test_convert.py`, 50 times each) 4 needed more
than 2 for the root mean square, 2.6 at most, and 16 for the largest error, 3.2 at most; half of them needed
less than 0.6.
"""

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DRAWS, MOST_DRAWS = 4, 100
STEADY_EPSILON = 1e-4
"""Adam's epsilon where trained weights are compared. Adam divides each gradient by its own size: with 1e-8,
the sign of a gradient that is only rounding decides a whole step, and processors round differently."""

FACTOR = torch.tensor([2.0, 2.0], dtype=torch.float64)
FACTOR_OF_ONE_DRAW = torch.tensor([2.0, 4.0], dtype=torch.float64)
FACTOR_OF_A_MODEL = torch.tensor([4.0, 4.0], dtype=torch.float64)
ROUNDING = torch.tensor([0.25, 1.0], dtype=torch.float64)
SUMMATION = torch.finfo(torch.float32).eps


def errors(result: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """Root mean square and largest absolute difference, on the CPU."""
    difference = (result.double() - oracle.double()).flatten()
    if difference.numel() == 0:
        return torch.zeros(2, dtype=torch.float64, device="cpu")
    return torch.stack([difference.square().mean().sqrt(), difference.abs().max()]).cpu()


class _AnyOrder(TorchDispatchMode):
    """Every matrix product sums its terms in a random order.

    Its generator is its own, since what is drawn may seed PyTorch's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(torch.initial_seed())

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            *first, a, b = arguments
            order = torch.randperm(a.shape[1], generator=self.generator).to(a.device)
            arguments = (*first, a[:, order], b[order])
        return function(*arguments, **(named or {}))


class Draws:
    """One of the results of `plain`: as written, and with the terms of matrix products in other orders.

    Results in 16 bits are drawn once.
    """

    def __init__(
        self,
        plain: Callable[[], list[torch.Tensor]],
        index: int,
        first: list[torch.Tensor],
        any_order: _AnyOrder,
    ) -> None:
        self.plain, self.index, self.results, self.any_order = plain, index, first, any_order

    def more(self) -> None:
        """Draw up to `MOST_DRAWS`."""
        while len(self.results) < MOST_DRAWS and self.results[0].dtype == torch.float32:
            with self.any_order:
                self.results.append(self.plain()[self.index])


def in_other_orders(plain: Callable[[], list[torch.Tensor]]) -> list[Draws]:
    """The results of `plain`, for `assert_as_exact`."""
    draws, any_order = [plain()], _AnyOrder()
    while len(draws) < DRAWS and draws[0][0].dtype == torch.float32:
        with any_order:
            draws.append(plain())
    return [Draws(plain, index, list(each), any_order) for index, each in enumerate(zip(*draws, strict=True))]


def assert_as_exact(
    result: torch.Tensor,
    plain: torch.Tensor | Draws,
    oracle: torch.Tensor,
    what: str,
    *,
    of_a_model: bool = False,
) -> None:
    """Fail unless `result` is within the policy.

    Args:
        result: what is tested.
        plain: the same, computed by plain PyTorch in the dtype whose precision is expected; in several orders
            by `in_other_orders`.
        oracle: the same in fp64.
        what: for the message.
        of_a_model: it has gone through many layers.
    """
    assert result.shape == oracle.shape, f"{what}: shape {list(result.shape)}, expected {list(oracle.shape)}"
    assert result.isfinite().all(), f"{what}: not finite"
    draws = [plain] if isinstance(plain, torch.Tensor) else plain.results
    tiny = torch.finfo(draws[0].dtype).eps * ROUNDING + SUMMATION
    tiny *= errors(oracle, torch.zeros_like(oracle))
    got = errors(result, oracle)
    factor = FACTOR_OF_A_MODEL if of_a_model else FACTOR if len(draws) > 1 else FACTOR_OF_ONE_DRAW

    def allowed() -> torch.Tensor:
        return factor * torch.stack([errors(draw, oracle) for draw in draws]).amax(0) + tiny

    if isinstance(plain, Draws) and (got > allowed()).any():
        plain.more()
    assert (got <= allowed()).all(), f"{what}: rms and max error {got.tolist()}, allowed {allowed().tolist()}"


def assert_same_up_to_rounding(
    one: torch.Tensor, other: torch.Tensor, what: str, tolerance: float = 1e-5
) -> None:
    """Fail unless fp32 results of different order of summation agree: `|one - other| <= tolerance |other|`.

    Norms over the whole tensor; for results of whole models, where no step-by-step oracle exists. No element
    may differ by more than ten times as much of the largest one: a single wrong one hides in a norm.
    """
    assert one.shape == other.shape, f"{what}: shape {list(one.shape)}, expected {list(other.shape)}"
    difference, other = one.double() - other.double(), other.double()
    error = float(difference.norm() / other.norm().clamp_min(1e-30))
    assert error <= tolerance, f"{what}: relative error {error:.2e}, allowed {tolerance:.0e}"
    if other.numel():
        largest = float(difference.abs().max() / other.abs().max().clamp_min(1e-30))
        assert largest <= 10 * tolerance, f"{what}: largest error {largest:.2e}, allowed {10 * tolerance:.0e}"
