"""The norms of the rows of `W + s B A`, without that matrix.

    ‖W + s B A‖² = ‖W‖² + 2 s (B ∘ W Aᵀ) 1 + s² (B A Aᵀ ∘ B) 1        (row by row)

`W Aᵀ` is computed in fp32, or in fp64 if the base is fp64 or PyTorch may shorten fp32 products (TF32); the
rest is computed in fp64. Where the terms cancel so far that the norm would not be exact to 1e-6, the rows of
`W + s B A` themselves are computed in fp64.

Letters: O = d_out, D = d_in, R = rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .weight import FrozenWeight

Adapter = tuple[Tensor, Tensor, float]
"""A `[R, D]`, B `[O, R]` and the scaling."""
_ELEMENTS = 1 << 18  # of one block of rows
_EXACT = 1e-6


@torch.inference_mode(False)
@torch.no_grad()
def row_squares(frozen: FrozenWeight) -> Tensor:
    """Returns the squares of the norms of the rows of W: `[O]` fp64."""
    weight = frozen.dense().detach()
    return torch.cat([block.double().square().sum(1) for block in _blocks(weight)])


@torch.inference_mode(False)
@torch.no_grad()
def row_norms(
    frozen: FrozenWeight, adapters: Sequence[Adapter], squares: Tensor | None = None
) -> list[Tensor]:
    """Returns the norms of the rows of `W + s B A` for each adapter: `[O]`, fp32, or fp64 for an fp64 base.

    Each adapter's norms have the same bits whichever other adapters are asked for.

    Args:
        frozen: W `[O, D]`; asked once for `dense()`.
        adapters: at least one.
        squares: what `row_squares` returned for W; None = computed here.
    """
    weight = frozen.dense().detach()
    squares = row_squares(frozen) if squares is None else squares
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    with torch.autocast(weight.device.type, enabled=False):
        found = [_factored(weight, squares, adapter) for adapter in adapters]
        inexact = torch.stack([doubtful for _, doubtful in found])
        if not isinstance(inexact, FakeTensor) and bool(inexact.any()):
            for (values, doubtful), adapter in zip(found, adapters, strict=True):
                rows = doubtful.nonzero().flatten()
                values[rows] = _dense(weight, rows, adapter)
    return [values.clamp_min_(0).sqrt_().to(dtype) for values, _ in found]


def _factored(weight: Tensor, squares: Tensor, adapter: Adapter) -> tuple[Tensor, Tensor]:
    """Returns the squared norms `[O]` fp64, and which of them are not exact enough `[O]` bool."""
    a_RD, b_OR, scaling = adapter[0].detach(), adapter[1].detach().double(), adapter[2]
    whole = weight.dtype == torch.float64 or torch.get_float32_matmul_precision() != "highest"
    dtype = torch.float64 if whole else torch.float32
    given = a_RD.to(dtype).t()
    product_OR = torch.cat([block.to(dtype) @ given for block in _blocks(weight, dtype)])
    a_RD = a_RD.double()
    gram_RR = a_RD @ a_RD.t()
    crossed = (b_OR * product_OR).sum(1).mul_(2 * scaling)
    found = (b_OR @ gram_RR).mul_(b_OR).sum(1).mul_(scaling**2).add_(squares).add_(crossed)
    # a product `w aᵀ` is exact to a few epsilons of ‖w‖ ‖a‖
    spread = (b_OR.square() @ gram_RR.diagonal()).mul_(scaling**2)
    error = (squares * spread).sqrt_().mul_(8 * torch.finfo(dtype).eps)
    return found, (error > 2 * _EXACT * found) | ~found.isfinite()


def _dense(weight: Tensor, rows: Tensor, adapter: Adapter) -> Tensor:
    """Returns the squared norms of some rows, fp64."""
    a, b, scaling = adapter[0].detach().double(), adapter[1].detach().double(), adapter[2]
    parts = [
        torch.addmm(weight[some].double(), b[some], a, alpha=scaling).square().sum(1)
        for some in rows.split(max(1, _ELEMENTS // max(1, weight.shape[1])))
    ]
    return torch.cat(parts) if parts else rows.double()


def _blocks(weight: Tensor, dtype: torch.dtype | None = None) -> Sequence[Tensor]:
    """Returns blocks of rows; the whole weight if it has this dtype, which needs no copy."""
    if weight.dtype == dtype:
        return [weight]
    return weight.split(max(1, _ELEMENTS // max(1, weight.shape[1])))
