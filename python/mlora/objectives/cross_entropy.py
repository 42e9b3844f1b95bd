"""Cross-entropy: minus the log-probability of every trained token."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mlora.objectives.objective import LossOfOwner, Objective


class CrossEntropy(Objective):
    """`cross_entropy`: the mean over the trained tokens of an accumulated batch, as `Trainer` has it."""

    one_pass = True

    def loss(self, log_p: Tensor, lengths: Sequence[int]) -> LossOfOwner:
        """Returns minus the sum of the log-probabilities."""
        return LossOfOwner(-log_p.sum())
