"""What an engine knows of an adapter and its batches, beside what the stages have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlora.optimizer import StepRule, Update
from mlora.packing import PackedBatch
from mlora.scaler import LossScaler


@dataclass(frozen=True)
class BatchResult:
    """An adapter's share of a batch.

    Attributes:
        loss_sum: sum of its token losses.
        tokens: number of its trained tokens.
        finite: whether `loss_sum` is a number.
    """

    loss_sum: float
    tokens: int
    finite: bool


@dataclass(frozen=True)
class StepResult:
    """An adapter's optimizer step.

    Attributes:
        step: optimizer steps so far, this one included, skipped or not.
        learning_rate: that of this step.
        grad_norm: norm of the mean gradient before clipping.
        skipped: whether the loss scaler skipped the step after an overflow, and lowered its scale.
        finite: whether the gradient was finite; if not, the weights are as before.
    """

    step: int
    learning_rate: float
    grad_norm: float
    skipped: bool
    finite: bool


@dataclass(frozen=True, eq=False)
class Ticket:
    """A batch that is under way.

    Attributes:
        parts: its micro-batches, each with its number in the pipeline, or none if it has nothing to train.
        ends: adapters whose accumulation it completes.
    """

    parts: Sequence[tuple[PackedBatch, int | None]]
    ends: Sequence[str]


@dataclass(eq=False)
class Account:
    """The counts of one adapter, and what was decided and not yet told to the stages.

    Attributes:
        replica: which pipeline it is in.
        rule: its learning rate and clipping.
        scaler: of its loss.
        steps: optimizer steps, taken or skipped.
        tokens: trained tokens since the last step.
        rows: rows since the last step.
        squares: sum of the squares of its gradients, where that has come back with a micro-batch.
        update: what the stages have to make just before the adapter's next forward.
    """

    replica: int
    rule: StepRule
    scaler: LossScaler
    steps: int = 0
    tokens: int = 0
    rows: int = 0
    squares: float | None = None
    update: Update | None = None

    def entered(self, rows: int, tokens: int) -> None:
        """Count a batch that has entered the pipeline."""
        self.rows += rows
        self.tokens += tokens
        self.squares = None

    def failed(self, rows: int, tokens: int) -> None:
        """Take back the count of a batch that did not come back."""
        self.rows -= rows
        self.tokens -= tokens

    def decide(self, squares: float) -> StepResult:
        """Decide a step on what was accumulated.

        Args:
            squares: sum of the squares of the gradients, over all stages.
        """
        done = self.rule.decide(squares, self.tokens * self.scaler.scale)
        skipped = self.scaler.update(overflow=not done.update.taken)
        self.steps += 1
        self.leave(done.update)
        return StepResult(self.steps, done.learning_rate, done.grad_norm, skipped, done.update.taken)

    def leave(self, update: Update) -> None:
        """Leave an update to the stages; what was accumulated is gone."""
        self.tokens = self.rows = 0
        self.squares, self.update = None, update

    def told(self) -> dict[str, Any] | None:
        """The update that the stages are told of now, or none."""
        update, self.update = self.update, None
        return None if update is None else asdict(update)

    def state_dict(self) -> dict[str, Any]:
        """Counts, as plain values."""
        return {
            "tokens": self.tokens,
            "rows": self.rows,
            "updates": self.rule.steps,
            "scaler": asdict(self.scaler),
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.scaler = LossScaler(**state["scaler"])
        self.rule.steps, self.steps = state["updates"], state["steps"]
        self.tokens, self.rows = state["tokens"], state["rows"]
        self.squares = self.update = None
