"""Log-probabilities of trained tokens in chunks of rows, and losses on them; never holds whole logits.

Shapes: T packed rows, M of them trained, D hidden size, V vocabulary, N owners of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from mlora.objectives.custom import FailuresOfLoss, LossError
from mlora.objectives.label_losses import LabelLogits, LabelObjective
from mlora.objectives.objective import LogProbs, LossOfOwner, Metric, Objective
from mlora_ext.frozen.weight import FrozenWeight

# Logits of a chunk. On a CPU they should stay in its cache. On a GPU a chunk needs enough rows to be worth a
# pass over the head's weight.
_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
_SMALLEST_CHUNK = 64


MetricSums = dict[str, tuple[float, float | None]]


@dataclass(frozen=True)
class LogitRule:
    """A model's computation on its head's output: `softcap · tanh(scale · z / softcap)`.

    Attributes:
        scale: factor (Cohere's `logit_scale`, the inverse of Granite's `logits_scaling`).
        softcap: bound, or None (Gemma's `final_logit_softcapping`).
    """

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitRule:
        """Reads the rule from a model's config."""
        scale = getattr(config, "logit_scale", None)
        scale = 1.0 if scale is None else float(scale)
        divisor = getattr(config, "logits_scaling", None)
        scale = scale if divisor is None else scale / float(divisor)
        return cls(scale, getattr(config, "final_logit_softcapping", None))

    def apply(self, logits: Tensor) -> Tensor:
        """Returns the model's logits from its head's output; differentiable."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


@dataclass(frozen=True, eq=False)
class Head:
    """A frozen head: W `[V, D]`, bias `[V]` or None, and the computation after the linear layer."""

    frozen: FrozenWeight
    bias: Tensor | None
    rule: LogitRule


@dataclass(frozen=True, eq=False)
class Owners:
    """The adapters that own the trained rows.

    Attributes:
        counts: trained rows of each owner; sums to M.
        scales: factor on each owner's gradient (a loss scaler's); reported losses do not have it.
        objectives: of each owner; None: cross-entropy for all.
        lengths: trained rows of each sequence of each owner; only read if there are objectives.
        facts: of each owner, those of its samples.
        reads: of each owner, the indices of the silent sequences that its objective reads.
        silent: log-probabilities of each silent sequence's tokens; they get no gradient.
    """

    counts: Sequence[int]
    scales: Sequence[float]
    objectives: Sequence[Objective] | None = None
    lengths: Sequence[Sequence[int]] = ()
    facts: Sequence[Sequence[Sequence[float]]] = ()
    reads: Sequence[Sequence[int]] = ()
    silent: Sequence[Tensor] = ()

    def one(self, index: int) -> Owners:
        """Returns one of the owners alone."""
        own = slice(index, index + 1)
        objectives = None if self.objectives is None else self.objectives[own]
        more = self.lengths[own], self.facts[own], self.reads[own], self.silent
        return Owners(self.counts[own], self.scales[own], objectives, *more)

    def log_probs(self, log_p: Tensor) -> list[LogProbs]:
        """Returns what each owner's objective is given; `log_p` `[M]` is of all owners.

        Each owner's are a leaf of autograd of their own.
        """
        found = []
        for index, part in enumerate(log_p.detach().split(list(self.counts))):
            own = part.requires_grad_(torch.is_grad_enabled())
            silent = [self.silent[place] for place in (self.reads[index] if self.reads else ())]
            lengths = [len(part) for part in silent]
            together = torch.cat(silent) if silent else own.new_zeros(0)
            facts = self.facts[index] if self.facts else ()
            found.append(LogProbs(own, self.lengths[index], together, lengths, facts))
        return found


@dataclass(frozen=True, eq=False)
class TokenLosses:
    """The losses of a micro-batch.

    Attributes:
        total: the scalar to differentiate.
        sums: `[N]` fp64, the loss of each owner; NaN if its objective failed, and its gradient is zero then.
        metrics: of each owner, if there are objectives: by name a total, and what divides it, None = units.
        faults: of each owner, if there are objectives: why its objective failed; empty if it did not.
    """

    total: Tensor
    sums: Tensor
    metrics: Sequence[MetricSums] = field(default_factory=list)
    faults: Sequence[str] = field(default_factory=list)


def chunked_losses(hidden: Tensor, head: Head, rows: Tensor, targets: Tensor, owners: Owners) -> TokenLosses:
    """Returns the losses of a frozen head's logits, with the gradient computed in the same pass.

    Cross-entropy: `loss_i = Σ_t logsumexp(z_t) - z_t[target_t]` over the trained rows t of owner i, in one
    pass. Other objectives take two passes: the first makes log-probabilities, and the gradient of the loss in
    them weighs the rows of the second. Softmax in fp32. Only trained rows meet the head. A row that is not
    finite spoils only its owner's sum and its own gradient.

    Args:
        hidden: `[T, D]` the head's input.
        rows: `[M]` trained rows, each owner's together, owners in order.
        targets: `[M]` the token to predict from each.
    """
    needs_grad = torch.is_grad_enabled() and hidden.requires_grad
    if owners.objectives is None or all(objective.one_pass for objective in owners.objectives):
        scales = _scales_of_rows(owners, hidden.device)
        losses, total = _ChunkedLosses.apply(hidden, head, rows, targets, scales, needs_grad)
        return TokenLosses(total, sums_by_owner(losses, owners.counts))
    log_p = log_probabilities(hidden, [head], rows, targets, [len(rows)])
    with torch.set_grad_enabled(needs_grad):
        weights, sums, metrics, faults = by_objective(log_p, owners)
    total = log_p.new_zeros(())
    if needs_grad:
        _, total = _ChunkedLosses.apply(hidden, head, rows, targets, weights.neg(), True)
    return TokenLosses(total, sums, metrics, faults)


class Scorer(Protocol):
    """A trained head.

    Attributes:
        size: V.
    """

    size: int

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns the logits `[M, V]` of rows `[M, D]`; differentiable in both."""


@torch.no_grad()
def log_probabilities(
    hidden: Tensor, heads: Sequence[Head | Scorer], rows: Tensor, targets: Tensor, counts: Sequence[int]
) -> Tensor:
    """Returns the log-probability of each target `[M]` fp32 without gradient, chunk by chunk.

    Args:
        heads: of each owner.
        counts: rows of each owner.
    """
    found = []
    for head, own, wanted in zip(heads, rows.split(list(counts)), targets.split(list(counts)), strict=True):
        if isinstance(head, Head):
            losses, _ = _ChunkedLosses.apply(hidden, head, own, wanted, None, False)
            found.append(losses.neg())
            continue
        size = chunk_rows(hidden.device, head.size)
        for part, each in zip(own.split(size), wanted.split(size), strict=True):
            logits = head(hidden.index_select(0, part)).float()
            found.append(-F.cross_entropy(logits, each, reduction="none"))
    return torch.cat(found)


def losses_of_own_heads(
    hidden: Tensor,
    heads: Sequence[Head | Scorer],
    rows: Tensor,
    targets: Tensor,
    owners: Owners,
) -> TokenLosses:
    """Returns losses as `chunked_losses` does, where some owners have trained heads of their own.

    Logits of tokens are made chunk by chunk, and again in backward. Those of labels are few.

    Args:
        heads: of each owner; an owner with a `LabelObjective` has one of its own.
    """
    total, begin = hidden.new_zeros((), dtype=torch.float32), 0
    sums = []
    metrics: list[MetricSums] = []
    faults: list[str] = []
    for i, count in enumerate(owners.counts):
        own = hidden.index_select(0, rows[begin : begin + count])
        wanted = targets[begin : begin + count]
        begin += count
        alone, head = owners.one(i), heads[i]
        if isinstance(head, Head):
            found = chunked_losses(own, head, torch.arange(count, device=own.device), wanted, alone)
        else:
            objective = None if owners.objectives is None else owners.objectives[i]
            if isinstance(objective, LabelObjective):
                found = _losses_of_labels(head(own).float(), wanted, alone, objective)
            else:
                found = _losses_of_own_head(own, head, wanted, alone)
        total = total + found.total
        sums.append(found.sums)
        metrics += found.metrics or [{}]
        faults += found.faults or [""]
    return TokenLosses(total, torch.cat(sums), metrics, faults)


def _losses_of_labels(
    logits: Tensor, targets: Tensor, owner: Owners, objective: LabelObjective
) -> TokenLosses:
    (lengths,), (values,) = owner.lengths, owner.facts
    if not lengths:
        return TokenLosses(logits.sum(), logits.new_zeros(1, dtype=torch.float64), [{}])
    found = objective.loss_of_logits(LabelLogits(logits, targets, lengths, values))
    metrics = {name: _as_sum(value) for name, value in found.metrics.items()}
    return TokenLosses(found.loss * owner.scales[0], found.loss.detach().double().reshape(1), [metrics])


def _losses_of_own_head(hidden: Tensor, head: Scorer, targets: Tensor, owner: Owners) -> TokenLosses:
    def chunk(own: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(head(own).float(), wanted, reduction="none")

    size = chunk_rows(hidden.device, head.size)
    parts = [
        checkpoint(chunk, own, wanted, use_reentrant=False, preserve_rng_state=False)
        for own, wanted in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    losses = torch.cat(parts)
    if owner.objectives is not None and not owner.objectives[0].one_pass:
        return _weighed(-losses, owner)
    return TokenLosses(losses.sum() * owner.scales[0], sums_by_owner(losses.detach(), owner.counts))


def _number(value: Tensor | float) -> float:
    """Returns a number; 0 for a fake tensor of a dry run, which has none."""
    return 0.0 if isinstance(value, FakeTensor) else float(value)


def plain_losses(logits: Tensor, targets: Tensor, owners: Owners) -> TokenLosses:
    """Returns losses as `chunked_losses` does, by autograd from whole logits `[M, V]`: for a trained head."""
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    if owners.objectives is not None:
        return _weighed(-losses, owners)
    parts = zip(losses.split(list(owners.counts)), owners.scales, strict=True)
    total = sum(part.sum() * scale for part, scale in parts)
    assert isinstance(total, Tensor)
    return TokenLosses(total, sums_by_owner(losses.detach(), owners.counts))


def _weighed(log_p: Tensor, owners: Owners) -> TokenLosses:
    """Returns the losses of log-probabilities `[M]` that autograd has made."""
    weights, sums, metrics, faults = by_objective(log_p, owners)
    return TokenLosses((log_p * weights).sum(), sums, metrics, faults)


def by_objective(log_p: Tensor, owners: Owners) -> tuple[Tensor, Tensor, list[MetricSums], list[str]]:
    """Returns the scaled gradient in log-probabilities `[M]`, and each owner's loss, metrics and fault.

    `log_p` `[M]` is of all owners, which have objectives. An objective of one's own may raise anything. That
    spoils its owner's loss only.
    """
    assert owners.objectives is not None
    gradients, sums, metrics, faults = [], [], [], []
    for rows, objective, scale in zip(owners.log_probs(log_p), owners.objectives, owners.scales, strict=True):
        gradient, loss = torch.zeros_like(rows.log_p), rows.log_p.new_tensor(math.nan, dtype=torch.float64)
        own: MetricSums = {}
        fault = ""
        try:
            with FailuresOfLoss(objective, rows):
                found = _checked(objective.loss_of(rows))
                own = {name: _as_sum(value) for name, value in found.metrics.items()}
                if rows.log_p.requires_grad:
                    (gradient,) = torch.autograd.grad(found.loss * scale, rows.log_p)
                loss = found.loss.detach().to(loss)
        except LossError as error:
            fault = str(error)
        gradients.append(gradient)
        sums.append(loss)
        metrics.append(own)
        faults.append(fault)
    return torch.cat(gradients), torch.stack(sums), metrics, faults


def _checked(found: Any) -> LossOfOwner:
    """Returns what an objective has computed; raises TypeError or ValueError if it is no such result."""
    if not isinstance(found, LossOfOwner) or not isinstance(found.loss, Tensor):
        came = type(found.loss if isinstance(found, LossOfOwner) else found).__name__
        raise TypeError(f"expected LossOfOwner with a tensor of shape [], got {came}")
    if found.loss.shape != ():
        raise ValueError(f"expected a loss of shape [], a sum over units, got {list(found.loss.shape)}")
    return found


def _as_sum(metric: Metric) -> tuple[float, float | None]:
    if isinstance(metric, tuple):
        return _number(metric[0]), float(metric[1])
    return _number(metric), None


def _scales_of_rows(owners: Owners, device: torch.device) -> Tensor | None:
    """Returns the scale of each row, `[M]` fp32, or None if all are 1."""
    if all(scale == 1.0 for scale in owners.scales):
        return None
    factors = torch.tensor(owners.scales, dtype=torch.float32, device=device)
    counts = torch.tensor(owners.counts, device=device)
    return factors.repeat_interleave(counts, output_size=sum(owners.counts))


def sums_by_owner(losses: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns `[N]` fp64 sums of runs of `losses [M]`; each sum depends on its own run only."""
    lengths = torch.tensor(counts, dtype=torch.int64, device=losses.device)
    return torch.segment_reduce(losses.double(), "sum", lengths=lengths, initial=0.0)


def chunk_rows(device: torch.device, vocabulary: int) -> int:
    """Returns the rows of logits that `chunked_losses` holds at once; up to there its memory grows with M."""
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
    """Returns the losses of a chunk of rows and their gradient in `hidden`; works in place on the logits."""
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
