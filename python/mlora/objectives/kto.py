"""Kahneman-Tversky optimization (Ethayarajh et al., arXiv 2402.01306, Eq. 7).

Shapes: N completions of a micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlora.objectives.objective import LogProbs, LossOfOwner, Metric, Objective
from mlora.objectives.options import KtoOptions


class Kto(Objective):
    """`kto`: `1 - σ(β (r - z))` for desirable completions, `1 - σ(β (z - r))` for others, each weighted.

    `r = log π(y|x)/π_ref(y|x)`; z estimates the KL divergence: the mean of r over each prompt with the
    completion of the sample before, at least 0, without gradient. As TRL's ``KTOTrainer``; with
    `apo_zero_unpaired` (arXiv 2408.06266, Eq. 7) there is no z.
    """

    takes = "judged"

    def __init__(self, **options: object) -> None:
        self.options = KtoOptions.model_validate(options)
        self.reference = self.options.reference
        self.mismatched = self.options.loss_type == "kto"

    def loss_of(self, rows: LogProbs) -> LossOfOwner:
        """Returns the sum over completions, and TRL's metrics, whose means are over one label each."""
        (labels,), sums, silent = rows.facts, rows.sums(), rows.silent_sums()
        count, desirable = len(labels), torch.tensor(labels, device=sums.device) > 0
        ratios = sums - silent[:count]
        z = self._divergence(silent, count)
        beta = self.options.beta
        losses = torch.where(
            desirable,
            self.options.desirable_weight * (1 - torch.sigmoid(beta * (ratios - z))),
            self.options.undesirable_weight * (1 - torch.sigmoid(beta * (z - ratios))),
        )
        metrics = _metrics(beta * ratios.detach(), sums.detach(), desirable)
        return LossOfOwner(losses.sum(), {"kl": (z, 1.0), **metrics})

    def _divergence(self, silent: Tensor, count: int) -> Tensor:
        """Returns z, `[]`: from the adapter's and the reference's mismatched sequences."""
        if not self.mismatched:
            return silent.new_zeros(())
        return (silent[count : 2 * count] - silent[2 * count :]).mean().clamp(min=0)


def _metrics(rewards: Tensor, log_p: Tensor, desirable: Tensor) -> dict[str, Metric]:
    """Returns means over chosen and over rejected completions; none of those that the batch lacks."""
    found: dict[str, Metric] = {}
    means = {}
    for name, own in (("chosen", desirable), ("rejected", ~desirable)):
        count = int(own.sum())
        if count:
            means[name] = rewards[own].sum() / count
            found[f"rewards/{name}"] = (means[name], 1.0)
            found[f"logps/{name}"] = (log_p[own].sum() / count, 1.0)
    if len(means) == 2:
        found["rewards/margins"] = (means["chosen"] - means["rejected"], 1.0)
    return found
