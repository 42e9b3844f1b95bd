"""Direct preference optimization (Rafailov et al., arXiv 2305.18290, Eq. 7) and its variants.

Shapes: N preference pairs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mlora.objectives.objective import LogProbs, LossOfOwner, Objective, rewards
from mlora.objectives.options import DpoOptions


class Dpo(Objective):
    """`dpo`: `-log σ(β (log π(y)/π_ref(y) - log π(y')/π_ref(y')))` and variants, as TRL's ``DPOTrainer``.

    y is chosen and y' rejected. `hinge` is SLiC's (arXiv 2305.10425), `ipo` Eq. 17 of arXiv 2310.12036 with
    means over tokens, `robust` Eq. 5 of arXiv 2403.00409.
    """

    takes = "pairs"

    def __init__(self, **options: object) -> None:
        self.options = DpoOptions.model_validate(options)
        self.reference = self.options.reference

    def loss_of(self, rows: LogProbs) -> LossOfOwner:
        """Returns the sum over pairs, and TRL's `rewards/...` and `logps/...`."""
        sums, base = rows.sums(), rows.silent_sums()
        ratios = sums - base
        chosen, rejected = ratios[0::2], ratios[1::2]
        beta = self.options.beta
        metrics = rewards(beta * chosen, beta * rejected)
        metrics |= {"logps/chosen": sums[0::2].detach().sum(), "logps/rejected": sums[1::2].detach().sum()}
        return LossOfOwner(self._losses(chosen, rejected, rows).sum(), metrics)

    def _losses(self, chosen: Tensor, rejected: Tensor, rows: LogProbs) -> Tensor:
        """Returns the loss of each pair, `[N]`, from the log-ratios."""
        beta, smoothing = self.options.beta, self.options.label_smoothing
        delta = beta * (chosen - rejected)
        if self.options.loss_type == "sigmoid":
            return -F.logsigmoid(delta)
        if self.options.loss_type == "hinge":
            return torch.relu(1 - delta)
        if self.options.loss_type == "robust":
            flipped = smoothing * F.logsigmoid(-delta) - (1 - smoothing) * F.logsigmoid(delta)
            return flipped / (1 - 2 * smoothing)
        counts = torch.tensor([fact[:2] for fact in rows.facts], dtype=chosen.dtype, device=chosen.device)
        apart = chosen / counts[:, 0] - rejected / counts[:, 1]
        return (apart - 1 / (2 * beta)).square()
