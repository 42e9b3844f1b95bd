"""Cross-entropy per adapter, in row chunks: the logits of all rows are never held together.

Shapes: T packed rows, M of them trained, D hidden size, V vocabulary, N owners of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlora_ext.frozen.weight import FrozenWeight

# Logits of a chunk. On a CPU they should stay in its cache; a GPU needs enough rows for each pass over the
# head's weight to be worth it.
_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
_SMALLEST_CHUNK = 64


@dataclass(frozen=True)
class LogitRule:
    """What a model does to its head's output: `softcap · tanh(scale · z / softcap)`.

    Attributes:
        scale: factor (Cohere's `logit_scale`, the inverse of Granite's `logits_scaling`).
        softcap: bound, or None (Gemma's `final_logit_softcapping`).
    """

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitRule:
        """Read the rule from a model's config."""
        scale = getattr(config, "logit_scale", None)
        scale = 1.0 if scale is None else float(scale)
        divisor = getattr(config, "logits_scaling", None)
        scale = scale if divisor is None else scale / float(divisor)
        return cls(scale, getattr(config, "final_logit_softcapping", None))

    def apply(self, logits: Tensor) -> Tensor:
        """The model's logits from its head's output; differentiable."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


@dataclass(frozen=True, eq=False)
class Head:
    """A frozen head.

    Attributes:
        frozen: W `[V, D]`.
        bias: `[V]` or None.
        rule: what follows the linear layer.
    """

    frozen: FrozenWeight
    bias: Tensor | None
    rule: LogitRule


def chunked_losses(
    hidden: Tensor, head: Head, rows: Tensor, targets: Tensor, counts: Sequence[int], scales: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Sums of token losses, one per owner, with the gradient computed in the same pass.

    `loss_i = Σ_t logsumexp(z_t) - z_t[target_t]` over the trained rows t of owner i. Softmax in fp32. Only
    trained rows meet the head. A row that is not finite spoils only its owner's sum and its own gradient.

    Args:
        hidden: `[T, D]` the head's input.
        head: frozen.
        rows: `[M]` trained rows, each owner's together, owners in order.
        targets: `[M]` the token to predict from each.
        counts: trained rows of each owner; sums to M.
        scales: factor of each owner's gradient (a loss scaler's), not of the reported sum.

    Returns:
        The scalar to differentiate, `Σ_i scale_i · loss_i`, and `[N]` fp64 the sums themselves.
    """
    needs_grad = torch.is_grad_enabled() and hidden.requires_grad
    row_scales = None
    if any(scale != 1.0 for scale in scales):
        factors = torch.tensor(scales, dtype=torch.float32, device=hidden.device)
        row_scales = factors.repeat_interleave(
            torch.tensor(counts, device=hidden.device), output_size=sum(counts)
        )
    losses, total = _ChunkedLosses.apply(hidden, head, rows, targets, row_scales, needs_grad)
    return total, sums_by_owner(losses, counts)


def plain_losses(
    logits: Tensor, targets: Tensor, counts: Sequence[int], scales: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """As `chunked_losses`, by autograd from whole logits `[M, V]`: for a head that is itself trained."""
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    total = sum(part.sum() * scale for part, scale in zip(losses.split(list(counts)), scales, strict=True))
    assert isinstance(total, Tensor)
    return total, sums_by_owner(losses.detach(), counts)


def sums_by_owner(losses: Tensor, counts: Sequence[int]) -> Tensor:
    """`[N]` fp64 sums of runs of `losses [M]`; each sum depends on its own run only."""
    lengths = torch.tensor(counts, dtype=torch.int64, device=losses.device)
    return torch.segment_reduce(losses.double(), "sum", lengths=lengths, initial=0.0)


def chunk_rows(device: torch.device, vocabulary: int) -> int:
    """Rows whose logits `chunked_losses` holds at once: its workspace grows up to so many trained rows."""
    elements = _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELEMENTS["cuda"])
    return max(_SMALLEST_CHUNK, elements // vocabulary)


class _ChunkedLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Head,
        rows: Tensor,
        targets: Tensor,
        row_scales: Tensor | None,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        losses = torch.empty(rows.shape[0], dtype=torch.float32, device=hidden.device)
        gradient = torch.zeros_like(hidden) if needs_grad else None
        size = chunk_rows(hidden.device, head.frozen.shape[0])
        for begin in range(0, rows.shape[0], size):
            part = slice(begin, begin + size)
            scales = None if row_scales is None else row_scales[part]
            picked = hidden.index_select(0, rows[part])
            losses[part], d_picked = _chunk(picked, head, targets[part], scales, needs_grad)
            if gradient is not None:
                gradient.index_copy_(0, rows[part], d_picked)
        ctx.gradient = gradient
        ctx.mark_non_differentiable(losses)
        return losses, losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # Freed here: a second backward through the same micro-batch has no meaning.
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(upstream.to(gradient.dtype)), None, None, None, None, None


def _chunk(
    hidden: Tensor, head: Head, targets: Tensor, scales: Tensor | None, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """Losses of a chunk of rows and their gradient in `hidden`; works in place on one chunk of logits."""
    rule = head.rule
    logits = head.frozen.matmul(hidden, head.bias).float()
    if rule.scale != 1.0:
        logits.mul_(rule.scale)
    slope = None
    if rule.softcap is not None:
        logits.div_(rule.softcap).tanh_()
        slope = 1.0 - logits.square() if needs_grad else None
        logits.mul_(rule.softcap)
    log_p = torch.log_softmax(logits, dim=-1)
    column = targets.unsqueeze(1)
    losses = -log_p.gather(1, column).squeeze(1)
    if not needs_grad:
        return losses, losses
    d_logits = log_p.exp_()
    d_logits.scatter_add_(1, column, torch.full_like(column, -1.0, dtype=torch.float32))
    if slope is not None:
        d_logits.mul_(slope)
    if rule.scale != 1.0:
        d_logits.mul_(rule.scale)
    if scales is not None:
        d_logits.mul_(scales.unsqueeze(1))
    return losses, head.frozen.matmul_dx(d_logits.to(hidden.dtype))
