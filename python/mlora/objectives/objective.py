"""The interface of an objective, and cross-entropy. To add one, write one class: see `Objective`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class LossOfOwner:
    """An objective's result for one adapter's rows of a micro-batch.

    Attributes:
        loss: `[]`, a sum over units; differentiable in the log-probabilities.
        metrics: sums over units, by their names in ``metrics.jsonl``.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


class Objective(ABC):
    """A loss on log-probabilities of tokens.

    The trained tokens of an adapter's samples become rows of the micro-batch. The last stage computes the
    log-probability of each, with bounded memory, and asks the objective for the loss. Gradients are divided
    by the units of the whole accumulated batch. A sample may have several sequences, such as a preference
    pair.

    Register a class with `mlora.objectives.registry.register_objective`.

    Attributes:
        one_pass: whether the loss is minus the sum of the log-probabilities, which needs one pass over the
            head; other losses need two.

    Example:
        >>> class Focal(Objective):
        ...     def loss(self, log_p, lengths):
        ...         return LossOfOwner(-((1 - log_p.exp()) ** 2 * log_p).sum())
        >>> register_objective("focal", Focal)
    """

    one_pass = False

    def units(self, samples: Sequence[Any], trained: int) -> int:
        """Returns the number of units that the loss of these samples is divided by.

        Args:
            samples: samples of one adapter in a micro-batch.
            trained: the number of their trained tokens, which is the default.
        """
        return trained

    @abstractmethod
    def loss(self, log_p: Tensor, lengths: Sequence[int]) -> LossOfOwner:
        """Computes the loss of one adapter's rows.

        Args:
            log_p: `[M]` fp32, the log-probability of each trained token, sequence after sequence.
            lengths: trained tokens of each sequence; sums to M.

        Returns:
            The loss, a sum over units, and metrics.
        """


class CrossEntropy(Objective):
    """`cross_entropy`: the mean over the trained tokens of an accumulated batch, as `Trainer` has it."""

    one_pass = True

    def loss(self, log_p: Tensor, lengths: Sequence[int]) -> LossOfOwner:
        """Returns minus the sum of the log-probabilities."""
        return LossOfOwner(-log_p.sum())
