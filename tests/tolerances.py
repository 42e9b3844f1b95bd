"""The one tolerance policy: as exact as plain PyTorch in the same dtype, against an fp64 oracle.

`err(result, oracle) <= 2 * err(plain, oracle) + tiny` for the root mean square over all elements. For the
largest element, which shows a single wrong one, the factor is 4: plain PyTorch's largest error is one draw of
a heavy tail, and with 2 one in 1,800 comparisons of right results failed, by 5%. `tiny` covers what plain
PyTorch gets exactly by chance in a small tensor. Rounding the result: a quarter of the dtype's epsilon for
the root mean square, one epsilon for the largest element. The order of fp32 sums: one fp32 epsilon.
"""

import torch

FACTOR = torch.tensor([2.0, 4.0], dtype=torch.float64)
ROUNDING = torch.tensor([0.25, 1.0], dtype=torch.float64)
SUMMATION = torch.finfo(torch.float32).eps


def errors(result: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """Root mean square and largest absolute difference."""
    difference = (result.double() - oracle.double()).flatten()
    if difference.numel() == 0:
        return torch.zeros(2, dtype=torch.float64)
    return torch.stack([difference.square().mean().sqrt(), difference.abs().max()])


def assert_as_exact(result: torch.Tensor, plain: torch.Tensor, oracle: torch.Tensor, what: str) -> None:
    """Fail unless `result` is within the policy.

    Args:
        result: what is tested.
        plain: the same, computed by plain PyTorch in the dtype whose precision is expected.
        oracle: the same in fp64.
        what: for the message.
    """
    assert result.shape == oracle.shape, f"{what}: shape {list(result.shape)}, expected {list(oracle.shape)}"
    assert result.isfinite().all(), f"{what}: not finite"
    tiny = torch.finfo(plain.dtype).eps * ROUNDING + SUMMATION
    tiny *= errors(oracle, torch.zeros_like(oracle))
    got, allowed = errors(result, oracle), FACTOR * errors(plain, oracle) + tiny
    assert (got <= allowed).all(), f"{what}: rms and max error {got.tolist()}, allowed {allowed.tolist()}"


def assert_same_up_to_rounding(
    one: torch.Tensor, other: torch.Tensor, what: str, tolerance: float = 1e-5
) -> None:
    """Fail unless fp32 results of different order of summation agree: `|one - other| <= tolerance |other|`.

    Norms over the whole tensor; for results of whole models, where no step-by-step oracle exists.
    """
    assert one.shape == other.shape, f"{what}: shape {list(one.shape)}, expected {list(other.shape)}"
    error = float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))
    assert error <= tolerance, f"{what}: relative error {error:.2e}, allowed {tolerance:.0e}"
