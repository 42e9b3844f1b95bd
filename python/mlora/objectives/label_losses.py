"""Losses of heads that predict labels, as Transformers' models for classification and answers have them.

Shapes: M rows with a label, K labels, S samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mlora.objectives.objective import LossOfOwner, Objective


@dataclass(frozen=True, eq=False)
class LabelLogits:
    """What the head of one adapter says of its rows of a micro-batch.

    Attributes:
        logits: `[M, K]` fp32, sample after sample.
        targets: `[M]` int64, the labels of the rows; 0 where a sample has `values`.
        lengths: rows of each sample; sums to M.
        values: of each sample, those of its `LabelledSample`.
    """

    logits: Tensor
    targets: Tensor
    lengths: Sequence[int]
    values: Sequence[Sequence[float]]

    def table(self) -> Tensor:
        """Returns the values, `[S, K]` fp32."""
        return torch.tensor(self.values, dtype=torch.float32, device=self.logits.device)


class LabelObjective(Objective):
    """The loss of a head with `num_labels` labels, on `mlora.data.record.LabelledSample`.

    It is a sum over samples, unless it says otherwise.

    Attributes:
        one_row: whether the head reads one row of each sample; else it reads each labelled one.
    """

    one_row = True

    def __init__(self, num_labels: int) -> None:
        self.num_labels = num_labels

    def units(self, samples: Sequence[Any], trained: int) -> int:
        """Returns the number of samples."""
        return len(samples)

    def loss_of_logits(self, rows: LabelLogits) -> LossOfOwner:
        """Computes the loss of one adapter's rows, and its `accuracy` if it has one."""
        raise NotImplementedError

    def rows(self, lengths: Sequence[int]) -> list[int]:
        """Returns how many rows of each sample the head reads, at most."""
        return [1] * len(lengths) if self.one_row else list(lengths)

    def stand_in(self) -> tuple[float, ...]:
        """Returns `values` of a sample that is only run to see what it takes."""
        return (0.0,) * self.num_labels

    def fault(self, labels: Sequence[int], values: Sequence[float]) -> str | None:
        """Returns what is wrong with a sample's labels and values; None if nothing is."""
        if len(values) != self.num_labels:
            return f"expected {self.num_labels} values of a sample, got {len(values)}"
        if sum(label == 0 for label in labels) != 1 or max(labels) > 0:
            return "expected label 0 for one token of a sample with values, and -100 for the others"
        return None if all(map(math.isfinite, values)) else f"expected finite values, got {list(values)}"


class SingleLabel(LabelObjective):
    """Cross-entropy, a sum over labelled tokens or samples; `accuracy` is the share of right labels."""

    one_row = False

    def units(self, samples: Sequence[Any], trained: int) -> int:
        """Returns the number of labels."""
        return trained

    def loss_of_logits(self, rows: LabelLogits) -> LossOfOwner:
        """`loss = Σ_m logsumexp(z_m) - z_m[target_m]`."""
        loss = F.cross_entropy(rows.logits, rows.targets, reduction="sum")
        return LossOfOwner(loss, {"accuracy": (rows.logits.argmax(-1) == rows.targets).sum()})

    def stand_in(self) -> tuple[float, ...]:
        """Returns none."""
        return ()

    def fault(self, labels: Sequence[int], values: Sequence[float]) -> str | None:
        """Refuses labels that the head does not have."""
        if values:
            return f"expected labels without values, got values {list(values)}"
        wrong = [each for each in labels if each != -100 and not 0 <= each < self.num_labels]
        return f"label {wrong[0]} is outside of the {self.num_labels} labels of its head" if wrong else None


class Regression(LabelObjective):
    """Mean squared error over a sample's values, a sum over samples."""

    def loss_of_logits(self, rows: LabelLogits) -> LossOfOwner:
        """`loss = Σ_s mean_k (z_sk - value_sk)²`."""
        return LossOfOwner(F.mse_loss(rows.logits, rows.table(), reduction="none").mean(-1).sum())


class MultiLabel(LabelObjective):
    """Binary cross-entropy of each label, the mean over labels, a sum over samples.

    `accuracy` is the share of samples with all labels right.
    """

    def loss_of_logits(self, rows: LabelLogits) -> LossOfOwner:
        """`loss = Σ_s mean_k softplus(z_sk) - value_sk · z_sk`."""
        wanted = rows.table()
        losses = F.binary_cross_entropy_with_logits(rows.logits, wanted, reduction="none")
        right = ((rows.logits > 0) == (wanted > 0.5)).all(-1).sum()
        return LossOfOwner(losses.mean(-1).sum(), {"accuracy": right})

    def fault(self, labels: Sequence[int], values: Sequence[float]) -> str | None:
        """Refuses values that are not 0 or 1."""
        wrong = [value for value in values if value not in (0, 1)]
        return f"expected values of 0 or 1, got {wrong[0]}" if wrong else super().fault(labels, values)


class Answer(LabelObjective):
    """The first and the last token of an answer: the mean of both cross-entropies over a sample's tokens.

    `accuracy` is the share of samples with both tokens right.
    """

    one_row = False

    def loss_of_logits(self, rows: LabelLogits) -> LossOfOwner:
        """`loss = Σ_s (CE(z_s[:, 0], start_s) + CE(z_s[:, 1], end_s)) / 2`."""
        logits = pad_sequence(rows.logits.split(list(rows.lengths)), True, -math.inf)  # [S, longest, 2]
        wanted = rows.table().long()
        losses = F.cross_entropy(logits, wanted, reduction="none")
        return LossOfOwner(losses.mean(-1).sum(), {"accuracy": (logits.argmax(1) == wanted).all(-1).sum()})

    def fault(self, labels: Sequence[int], values: Sequence[float]) -> str | None:
        """Refuses samples without the places of a first and a last token."""
        if set(labels) != {0}:
            return "expected label 0 for each token of a sample with an answer"
        if len(values) == 2 and all(value in range(len(labels)) for value in values):
            return None
        return f"expected the places of an answer's first and last token of {len(labels)}, got {list(values)}"
