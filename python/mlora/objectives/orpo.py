"""Odds ratio preference optimization (Hong et al., arXiv 2403.07691, Eq. 6 and 7)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mlora.objectives.cpo import nll_sum
from mlora.objectives.objective import LogProbs, LossOfOwner, Objective, rewards
from mlora.objectives.options import OrpoOptions


class Orpo(Objective):
    """`orpo`: the loss of prompt and chosen completion, minus `β log σ(log odds(y) - log odds(y'))`.

    `odds = p / (1 - p)`, where `log p` is the mean over a completion's tokens; as TRL's ``ORPOTrainer``.
    """

    takes = "pairs"
    trains_prompts = True

    def __init__(self, **options: object) -> None:
        self.options = OrpoOptions.model_validate(options)

    def loss_of(self, rows: LogProbs) -> LossOfOwner:
        """Returns the sum over pairs, and TRL's metrics."""
        runs = rows.log_p.split(list(rows.lengths))
        counts = [int(count) for fact in rows.facts for count in fact[:2]]  # of completion tokens
        log_p = torch.stack([run[len(run) - count :].mean() for run, count in zip(runs, counts, strict=True)])
        chosen, rejected = log_p[0::2], log_p[1::2]
        nll = nll_sum(-torch.stack([run.sum() for run in runs[0::2]]), rows)
        odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
        ratio = F.logsigmoid(odds)
        beta = self.options.beta
        metrics = rewards(beta * chosen, beta * rejected)
        metrics |= {
            "logps/chosen": chosen.detach().sum(),
            "logps/rejected": rejected.detach().sum(),
            "nll_loss": nll.detach(),
            "log_odds_ratio": ratio.detach().sum(),
            "log_odds_chosen": odds.detach().sum(),
        }
        return LossOfOwner(nll - beta * ratio.sum(), metrics)


def _log1mexp(x: Tensor) -> Tensor:
    """Returns `log(1 - exp(x))` for `x < 0` (Mächler, "Accurately computing log(1 - exp(-|a|))", 2012)."""
    return torch.where(x < -math.log(2), torch.log1p(-x.exp()), torch.log(-torch.expm1(x)))
