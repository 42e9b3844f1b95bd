"""The operators in plain PyTorch: readable, differentiable by plain autograd, and usable in fp64.

This is the oracle for the tests of the other backends. It computes in the dtype of `x`, rounds adapters to
it, as autocast does, and loops over segments on the host.

Letters: T rows, D = d_in, O = d_out, R = rank of one adapter, N adapters, S segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from ..backends.factors import refuse_meta
from .dropout import dropout_threshold, philox_mask


def lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    segments: torch.Tensor,
    scaling: torch.Tensor,
    dropout_p: torch.Tensor | None = None,
    dropout_rng: torch.Tensor | None = None,
    layer: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `y = x W^T + b + s B^T` and `s = scaling * drop(x) A^T` (mLoRA, Eq. 2), both differentiable.

    Arguments: `mlora_ext::lora_linear` in docs/design.md.
    """
    refuse_meta(not one.is_meta for one in (x, weight, *lora_a, *lora_b))
    plan = segments, scaling, dropout_p, dropout_rng, layer
    delta, shrunk = low_rank(x, weight.shape[0], lora_a, lora_b, *plan)
    return F.linear(x, weight, bias) + delta, shrunk


def low_rank(
    x: torch.Tensor,
    d_out: int,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    segments: torch.Tensor,
    scaling: torch.Tensor,
    dropout_p: torch.Tensor | None = None,
    dropout_rng: torch.Tensor | None = None,
    layer: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `s B^T [T, O]` and `s = scaling * drop(x) A^T`, both differentiable."""
    max_rank = max((a.shape[0] for a in lora_a), default=0)
    deltas, shrunk = [], []
    end = 0
    for begin, stop, adapter, mask in _parts(x, segments, scaling, dropout_p, dropout_rng, layer):
        deltas.append(x.new_zeros(begin - end, d_out))
        shrunk.append(x.new_zeros(begin - end, max_rank))
        a_RD, b_OR = lora_a[adapter].to(x.dtype), lora_b[adapter].to(x.dtype)
        s_TR = (_drop(x[begin:stop], mask) @ a_RD.t()) * scaling[adapter].to(x.dtype)
        deltas.append(s_TR @ b_OR.t())
        shrunk.append(F.pad(s_TR, (0, max_rank - s_TR.shape[1])))
        end = stop
    deltas.append(x.new_zeros(x.shape[0] - end, d_out))
    shrunk.append(x.new_zeros(x.shape[0] - end, max_rank))
    return torch.cat(deltas), torch.cat(shrunk)


def lora_linear_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    s: torch.Tensor,
    segments: torch.Tensor,
    scaling: torch.Tensor,
    dropout_p: torch.Tensor | None = None,
    dropout_rng: torch.Tensor | None = None,
    layer: torch.Tensor | None = None,
    need_dx: bool = True,
    need_da: bool = True,
    need_db: bool = True,
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """`ds = scaling dy B`, `dB = dy^T s`, `dA = ds^T drop(x)`, `dx = dy W + drop'(ds A)` (mLoRA, Eq. 3-4).

    Arguments and results: `mlora_ext::lora_linear_backward` in docs/design.md.
    """
    dx = dy @ weight if need_dx else dy.new_empty(0)
    da = [torch.zeros_like(a) for a in lora_a]
    db = [torch.zeros_like(b) for b in lora_b]
    for begin, stop, adapter, mask in _parts(x, segments, scaling, dropout_p, dropout_rng, layer):
        a_RD, b_OR = lora_a[adapter].to(x.dtype), lora_b[adapter].to(x.dtype)
        dy_TO = dy[begin:stop]
        ds_TR = (dy_TO @ b_OR) * scaling[adapter].to(x.dtype)
        da[adapter] += ds_TR.t() @ _drop(x[begin:stop], mask)
        db[adapter] += dy_TO.t() @ s[begin:stop, : a_RD.shape[0]]
        if need_dx:
            dx[begin:stop] += _drop(ds_TR @ a_RD, mask)
    return dx, da if need_da else [], db if need_db else []


def _parts(
    x: torch.Tensor,
    segments: torch.Tensor,
    scaling: torch.Tensor,
    dropout_p: torch.Tensor | None,
    dropout_rng: torch.Tensor | None,
    layer: torch.Tensor | None,
) -> Iterator[tuple[int, int, int, torch.Tensor | None]]:
    """Yields begin, end, adapter, dropout multiplier of each non-empty segment with an adapter, by row."""
    p = [0.0] * scaling.numel() if dropout_p is None else dropout_p.tolist()
    rng = None if dropout_rng is None else dropout_rng.tolist()
    index = 0 if layer is None else int(layer)
    for begin, end, adapter, row0 in sorted(segments.tolist()):
        if adapter < 0 or begin == end:
            continue
        mask = None
        if dropout_threshold(p[adapter]) > 0:
            assert rng is not None
            seed, step = rng[adapter]
            mask = philox_mask(
                end - begin,
                x.shape[1],
                p=p[adapter],
                seed=seed,
                step=step,
                layer=index,
                row0=row0,
                device=x.device,
            ).to(x.dtype)
            mask /= 1.0 - dropout_threshold(p[adapter]) / 65536
        yield begin, end, adapter, mask


def _drop(values: torch.Tensor, multiplier: torch.Tensor | None) -> torch.Tensor:
    return values if multiplier is None else torch.where(multiplier > 0, values * multiplier, 0.0)
