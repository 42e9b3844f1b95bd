"""The interface of an objective, and cross-entropy. To add one, write one class: see `Objective`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mlora.objectives.options import Takes

Metric = Tensor | float | tuple[Tensor | float, float]


@dataclass(frozen=True)
class LossOfOwner:
    """An objective's result for one adapter's rows of a micro-batch.

    Attributes:
        loss: `[]`, a sum over units; differentiable in the log-probabilities.
        metrics: by their names in ``metrics.jsonl``: a sum over units, or a total and what divides it.
    """

    loss: Tensor
    metrics: dict[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LogProbs:
    """Log-probabilities of one adapter's tokens in a micro-batch.

    Attributes:
        log_p: `[M]` fp32, of each trained token, sequence after sequence.
        lengths: trained tokens of each sequence; sums to M.
        silent: `[K]` fp32, of the tokens of sequences that get no gradient: those of the reference first, one
            for each sequence of `lengths`; then what else the objective asked for.
        silent_lengths: tokens of each of these sequences; sums to K.
        facts: plain numbers of each sample, as the data layer made them; see `Objective.takes`.
    """

    log_p: Tensor
    lengths: Sequence[int]
    silent: Tensor
    silent_lengths: Sequence[int] = ()
    facts: Sequence[Sequence[float]] = ()

    def sums(self) -> Tensor:
        """Returns `log p` of each sequence, `[S]`."""
        return sums_of(self.log_p, self.lengths)

    def silent_sums(self) -> Tensor:
        """Returns `log p` of each sequence without gradient; ValueError if there is none."""
        if not self.silent_lengths:
            raise ValueError("objective: silent_sums() needs a reference; set `reference: __base__`")
        return sums_of(self.silent, self.silent_lengths)


class Objective:
    """A loss on log-probabilities of tokens.

    The trained tokens of an adapter's samples become rows of the micro-batch. The last stage computes the
    log-probability of each, with bounded memory, and asks the objective for the loss. Gradients are divided
    by the units of the whole accumulated batch. A sample may have several sequences, such as a preference
    pair. A sample is never cut apart.

    Register a class with `mlora.objectives.registry.register_objective`. It overrides `loss`, or `loss_of`
    if it reads more than the log-probabilities of the adapter.

    Attributes:
        one_pass: whether the loss is minus the sum of the log-probabilities, which needs one pass over the
            head; other losses need two.
        takes: the kind of its samples. `sequences`: `mlora.data.record.Sample`, without facts. `pairs`:
            `mlora.data.preference.Pair`; chosen and rejected sequences alternate, and the facts of a pair are
            the scored completion tokens of both (all but a sequence's first token, which none precedes), and
            the batch's pairs over its trained tokens of chosen sequences.
            `judged`: `mlora.data.preference.Judged`; all of a batch are one sample, and the facts are its
            labels, 1 for desirable.
        reference: whose log-probabilities of the same sequences it reads: `__base__`, the name of an adapter,
            or `init_from`, the weights that its own adapter starts from; None = it reads none.
        trains_prompts: whether the prompts of chosen sequences are trained, too.
        mismatched: whether it also reads log-probabilities of each prompt with the completion of the sample
            before it in the batch, of the adapter and of the reference, as KTO does.

    Example:
        >>> class Focal(Objective):
        ...     def loss(self, log_p, lengths):
        ...         return LossOfOwner(-((1 - log_p.exp()) ** 2 * log_p).sum())
        >>> register_objective("focal", Focal)
    """

    one_pass = False
    takes: Takes = "sequences"
    reference: str | None = None
    trains_prompts = False
    mismatched = False

    def units(self, samples: Sequence[Any], trained: int) -> int:
        """Returns the number of units that the loss of these samples is divided by.

        Args:
            samples: samples of one adapter in a micro-batch.
            trained: the number of their trained tokens, which is the default for `sequences`. Pairs and
                judged completions count themselves.

        Returns:
            A whole number, of type int.
        """
        return trained if self.takes == "sequences" else sum(sample.units for sample in samples)

    def loss(self, log_p: Tensor, lengths: Sequence[int]) -> LossOfOwner:
        """Computes the loss of one adapter's rows.

        Args:
            log_p: `[M]` fp32, the log-probability of each trained token, sequence after sequence.
            lengths: trained tokens of each sequence; sums to M.

        Returns:
            The loss, a sum over units, and metrics.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither loss nor loss_of")

    def loss_of(self, rows: LogProbs) -> LossOfOwner:
        """Computes the loss of one adapter's rows, with all that `LogProbs` holds; by default `loss`."""
        return self.loss(rows.log_p, rows.lengths)


class CrossEntropy(Objective):
    """`cross_entropy`: the mean over the trained tokens of an accumulated batch, as `Trainer` has it."""

    one_pass = True

    def loss(self, log_p: Tensor, lengths: Sequence[int]) -> LossOfOwner:
        """Returns minus the sum of the log-probabilities."""
        return LossOfOwner(-log_p.sum())


def sums_of(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Returns sums of runs of `values`; differentiable. Each sum depends on its own run only."""
    if not lengths:
        return values.new_zeros(0)
    return torch.stack([run.sum() for run in values.split(list(lengths))])
