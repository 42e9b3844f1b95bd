"""Contrastive preference optimization (Xu et al., arXiv 2401.08417) and SimPO (arXiv 2405.14734).

Shapes: N preference pairs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mlora.objectives.objective import LogProbs, LossOfOwner, Objective, rewards
from mlora.objectives.options import CpoOptions, SimpoOptions


class Cpo(Objective):
    """`cpo`: `-log σ(β (log π(y) - log π(y')))` plus `cpo_alpha` times the chosen completions' loss.

    As TRL's ``CPOTrainer`` (Eq. 3 and 5 of the paper). `ipo` and `simpo` take means over tokens.
    """

    takes = "pairs"

    def __init__(self, **options: object) -> None:
        self.options = CpoOptions.model_validate(options)

    def loss_of(self, rows: LogProbs) -> LossOfOwner:
        """Returns the sum over pairs, and TRL's metrics."""
        sums = rows.sums()
        nll = nll_sum(-sums[0::2], rows)
        counts = torch.tensor(list(rows.lengths), dtype=sums.dtype, device=sums.device)
        log_p = sums / counts if self.options.loss_type in ("ipo", "simpo") else sums
        chosen, rejected = log_p[0::2], log_p[1::2]
        loss = self._losses(chosen - rejected).sum() + self.options.cpo_alpha * nll
        metrics = rewards(self.options.beta * chosen, self.options.beta * rejected)
        metrics |= {"logps/chosen": chosen.detach().sum(), "logps/rejected": rejected.detach().sum()}
        # TRL computes it only where it counts
        metrics["nll_loss"] = nll.detach() if self.options.cpo_alpha else 0.0
        return LossOfOwner(loss, metrics)

    def _losses(self, apart: Tensor) -> Tensor:
        """Returns the loss of each pair, `[N]`."""
        beta, smoothing = self.options.beta, self.options.label_smoothing
        if self.options.loss_type == "hinge":
            return torch.relu(1 - beta * apart)
        if self.options.loss_type == "ipo":
            return (apart - 1 / (2 * beta)).square()
        margin = self.options.simpo_gamma if self.options.loss_type == "simpo" else 0.0
        delta = beta * apart - margin
        return -F.logsigmoid(delta) * (1 - smoothing) - F.logsigmoid(-delta) * smoothing


class Simpo(Cpo):
    """`simpo`: `-log σ(β (mean log π(y) - mean log π(y')) - γ)` (Eq. 6), `cpo` with other defaults."""

    def __init__(self, **options: object) -> None:
        chosen = SimpoOptions.model_validate(options)
        super().__init__(loss_type="simpo", **chosen.model_dump())


def nll_sum(losses: Tensor, rows: LogProbs) -> Tensor:
    """Returns the mean loss of the batch's trained tokens of chosen sequences, for each pair; summed.

    `losses` `[N]` are sums over those tokens. The batch may have been cut: the third fact of a pair is what
    the whole batch's mean needs.
    """
    shares = torch.tensor([fact[2] for fact in rows.facts], dtype=losses.dtype, device=losses.device)
    return (losses * shares).sum()
