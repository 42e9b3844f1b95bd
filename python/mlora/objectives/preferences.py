"""Losses on preference data, a function for each objective: DPO, CPO, SimPO, ORPO and KTO, as in TRL.

Each takes one adapter's `LogProbs` and the model of its options, and returns a sum over pairs or completions
and TRL's metrics. Shapes: N preference pairs, or N completions for KTO.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mlora.objectives.objective import LogProbs, LossOfOwner, Metric, Objective
from mlora.objectives.options import CpoOptions, DpoOptions, KtoOptions, OrpoOptions, SimpoOptions, Takes

PreferenceFunction = Callable[[LogProbs, Any], LossOfOwner]


class PreferenceLoss(Objective):
    """An objective that is one of the functions here, with its options; `registry` says what it takes."""

    def __init__(
        self, function: PreferenceFunction, options: Any, *, takes: Takes, trains_prompts: bool
    ) -> None:
        self.name, self.takes, self.trains_prompts = function.__name__, takes, trains_prompts
        self.reference = getattr(options, "reference", None)
        self.mismatched = getattr(options, "loss_type", None) == "kto"
        self._function, self._options = function, options

    def loss_of(self, rows: LogProbs) -> LossOfOwner:
        """Returns what the function returns."""
        return self._function(rows, self._options)


def dpo(rows: LogProbs, options: DpoOptions) -> LossOfOwner:
    """Direct preference optimization (Rafailov et al., arXiv 2305.18290, Eq. 7), as TRL's ``DPOTrainer``.

    `-log σ(β (log π(y)/π_ref(y) - log π(y')/π_ref(y')))`, y is chosen and y' rejected. `hinge` is SLiC's
    (arXiv 2305.10425), `ipo` Eq. 17 of arXiv 2310.12036 with means over tokens, `robust` Eq. 5 of
    arXiv 2403.00409.
    """
    sums, base = rows.sums(), rows.silent_sums()
    ratios = sums - base
    chosen, rejected = ratios[0::2], ratios[1::2]
    beta, smoothing = options.beta, options.label_smoothing
    delta = beta * (chosen - rejected)
    if options.loss_type == "sigmoid":
        losses = -F.logsigmoid(delta)
    elif options.loss_type == "hinge":
        losses = torch.relu(1 - delta)
    elif options.loss_type == "robust":
        flipped = smoothing * F.logsigmoid(-delta) - (1 - smoothing) * F.logsigmoid(delta)
        losses = flipped / (1 - 2 * smoothing)
    else:
        counts = torch.tensor([fact[:2] for fact in rows.facts], dtype=chosen.dtype, device=chosen.device)
        apart = chosen / counts[:, 0] - rejected / counts[:, 1]
        losses = (apart - 1 / (2 * beta)).square()
    metrics = _rewards(beta * chosen, beta * rejected) | _log_p(sums[0::2], sums[1::2])
    return LossOfOwner(losses.sum(), metrics)


def cpo(rows: LogProbs, options: CpoOptions) -> LossOfOwner:
    """Contrastive preference optimization (Xu et al., arXiv 2401.08417, Eq. 3 and 5), as in TRL.

    `-log σ(β (log π(y) - log π(y')))` plus `cpo_alpha` times the chosen completions' loss. `ipo` and `simpo`
    take means over tokens.
    """
    sums = rows.sums()
    nll = _nll(-sums[0::2], rows)
    counts = torch.tensor(list(rows.lengths), dtype=sums.dtype, device=sums.device)
    log_p = sums / counts if options.loss_type in ("ipo", "simpo") else sums
    chosen, rejected = log_p[0::2], log_p[1::2]
    beta, smoothing, apart = options.beta, options.label_smoothing, chosen - rejected
    if options.loss_type == "hinge":
        losses = torch.relu(1 - beta * apart)
    elif options.loss_type == "ipo":
        losses = (apart - 1 / (2 * beta)).square()
    else:
        delta = beta * apart - (options.simpo_gamma if options.loss_type == "simpo" else 0.0)
        losses = -F.logsigmoid(delta) * (1 - smoothing) - F.logsigmoid(-delta) * smoothing
    metrics = _rewards(beta * chosen, beta * rejected) | _log_p(chosen, rejected)
    metrics["nll_loss"] = nll.detach() if options.cpo_alpha else 0.0  # TRL computes it only where it counts
    return LossOfOwner(losses.sum() + options.cpo_alpha * nll, metrics)


def simpo(rows: LogProbs, options: SimpoOptions) -> LossOfOwner:
    """SimPO (Meng et al., arXiv 2405.14734, Eq. 6): `cpo` with means over tokens and a margin γ.

    `-log σ(β (mean log π(y) - mean log π(y')) - γ)`.
    """
    return cpo(rows, CpoOptions(loss_type="simpo", **options.model_dump()))


def orpo(rows: LogProbs, options: OrpoOptions) -> LossOfOwner:
    """Odds ratio preference optimization (Hong et al., arXiv 2403.07691, Eq. 6 and 7), as in TRL.

    The loss of prompt and chosen completion, minus `β log σ(log odds(y) - log odds(y'))`.
    `odds = p / (1 - p)`, where `log p` is the mean over a completion's tokens.
    """
    runs = rows.log_p.split(list(rows.lengths))
    counts = [int(count) for fact in rows.facts for count in fact[:2]]  # of completion tokens
    log_p = torch.stack([run[len(run) - count :].mean() for run, count in zip(runs, counts, strict=True)])
    chosen, rejected = log_p[0::2], log_p[1::2]
    nll = _nll(-torch.stack([run.sum() for run in runs[0::2]]), rows)
    odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    ratio = F.logsigmoid(odds)
    metrics = _rewards(options.beta * chosen, options.beta * rejected) | _log_p(chosen, rejected)
    metrics |= {
        "nll_loss": nll.detach(),
        "log_odds_ratio": ratio.detach().sum(),
        "log_odds_chosen": odds.detach().sum(),
    }
    return LossOfOwner(nll - options.beta * ratio.sum(), metrics)


def kto(rows: LogProbs, options: KtoOptions) -> LossOfOwner:
    """Kahneman-Tversky optimization (Ethayarajh et al., arXiv 2402.01306, Eq. 7), as TRL's ``KTOTrainer``.

    `1 - σ(β (r - z))` for desirable completions, `1 - σ(β (z - r))` for others, each weighted.
    `r = log π(y|x)/π_ref(y|x)`; z estimates the KL divergence: the mean of r over each prompt with the
    completion of the sample before, at least 0, without gradient. With `apo_zero_unpaired`
    (arXiv 2408.06266, Eq. 7) there is no z. The metrics are means over the completions of one label each; a
    label that the batch lacks has none.
    """
    (labels,), sums, silent = rows.facts, rows.sums(), rows.silent_sums()
    count, desirable = len(labels), torch.tensor(labels, device=sums.device) > 0
    ratios = sums - silent[:count]
    z = silent.new_zeros(())
    if options.loss_type == "kto":  # the adapter's mismatched sequences come before the reference's
        z = (silent[count : 2 * count] - silent[2 * count :]).mean().clamp(min=0)
    losses = torch.where(
        desirable,
        options.desirable_weight * (1 - torch.sigmoid(options.beta * (ratios - z))),
        options.undesirable_weight * (1 - torch.sigmoid(options.beta * (z - ratios))),
    )
    metrics: dict[str, Metric] = {"kl": (z, 1.0)}
    log_p, rewards, means = sums.detach(), options.beta * ratios.detach(), {}
    for name, own in (("chosen", desirable), ("rejected", ~desirable)):
        if number := int(own.sum()):
            means[name] = rewards[own].sum() / number
            metrics[f"rewards/{name}"] = (means[name], 1.0)
            metrics[f"logps/{name}"] = (log_p[own].sum() / number, 1.0)
    if len(means) == 2:
        metrics["rewards/margins"] = (means["chosen"] - means["rejected"], 1.0)
    return LossOfOwner(losses.sum(), metrics)


def _rewards(chosen: Tensor, rejected: Tensor) -> dict[str, Metric]:
    """Returns TRL's metrics of the rewards of pairs, each `[N]`, as sums over pairs."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "rewards/chosen": chosen.sum(),
        "rewards/rejected": rejected.sum(),
        "rewards/accuracies": (chosen > rejected).float().sum(),
        "rewards/margins": (chosen - rejected).sum(),
    }


def _log_p(chosen: Tensor, rejected: Tensor) -> dict[str, Metric]:
    return {"logps/chosen": chosen.detach().sum(), "logps/rejected": rejected.detach().sum()}


def _nll(losses: Tensor, rows: LogProbs) -> Tensor:
    """Returns the mean loss of the batch's trained tokens of chosen sequences, for each pair; summed.

    `losses` `[N]` are sums over those tokens. The batch may have been cut: the third fact of a pair is what
    the whole batch's mean needs.
    """
    shares = torch.tensor([fact[2] for fact in rows.facts], dtype=losses.dtype, device=losses.device)
    return (losses * shares).sum()


def _log1mexp(x: Tensor) -> Tensor:
    """Returns `log(1 - exp(x))` for `x < 0` (Mächler, "Accurately computing log(1 - exp(-|a|))", 2012)."""
    return torch.where(x < -math.log(2), torch.log1p(-x.exp()), torch.log(-torch.expm1(x)))
