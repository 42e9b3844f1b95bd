"""What an engine knows of an adapter and its batches, beside what the stages have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from mlora.objectives.objective import Objective
from mlora.objectives.registry import CROSS_ENTROPY, objective_of
from mlora.optim.scaler import LossScaler
from mlora.optim.step_rule import StepRule, Update


@dataclass(frozen=True)
class BatchResult:
    """An adapter's share of a batch.

    Attributes:
        loss_sum: sum of its losses, over units.
        tokens: number of its trained tokens.
        finite: whether `loss_sum` is a number.
        units: what divides the loss: the trained tokens, unless its objective says otherwise.
        metrics: sums of the objective's metrics, over units.
    """

    loss_sum: float
    tokens: int
    finite: bool
    units: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    def plus(self, other: BatchResult) -> BatchResult:
        """Returns the sums of both."""
        loss = self.loss_sum + other.loss_sum
        names = {**self.metrics, **other.metrics}
        metrics = {name: self.metrics.get(name, 0.0) + other.metrics.get(name, 0.0) for name in names}
        units = self.units + other.units
        return BatchResult(loss, self.tokens + other.tokens, math.isfinite(loss), units, metrics)

    def mean_metrics(self) -> dict[str, float]:
        """Returns the objective's metrics by unit."""
        return {name: total / self.units for name, total in self.metrics.items()}


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


@dataclass(eq=False)
class AdapterState:
    """The counts of one adapter, and what was decided and not yet told to the stages.

    Attributes:
        replica: which pipeline it is in.
        rule: its learning rate and clipping.
        scaler: of its loss.
        objective_name: what it is trained for; a name of `mlora.objectives.registry`.
        steps: optimizer steps, taken or skipped.
        units: what divides its gradient, since the last step.
        rows: rows since the last step.
        squares: sum of the squares of its gradients, where that has come back with a micro-batch.
        update: what the stages have to make just before the adapter's next forward.
        under_way: micro-batches, evaluated ones too, that have entered the pipeline and not come back.
        ending: whether the last of its accumulation is among them.
    """

    replica: int
    rule: StepRule
    scaler: LossScaler
    objective_name: str = CROSS_ENTROPY
    steps: int = 0
    units: int = 0
    rows: int = 0
    squares: float | None = None
    update: Update | None = None
    under_way: int = 0
    ending: bool = False

    @cached_property
    def objective(self) -> Objective:
        """What it is trained for."""
        return objective_of(self.objective_name)

    def entered(self, rows: int, units: int) -> None:
        """Count a micro-batch that has entered the pipeline."""
        self.rows += rows
        self.units += units
        self.under_way += 1
        self.squares = None

    def came_back(self) -> None:
        """Count one that has passed it."""
        self.under_way -= 1

    def failed(self) -> None:
        """Count one that will not come back.

        Its backward may have added to some of the gradients, so all that was accumulated is dropped.
        """
        self.under_way -= 1
        self.ending = False
        self.leave(Update())

    def decide(self, squares: float) -> StepResult:
        """Decide a step on what was accumulated.

        Args:
            squares: sum of the squares of the gradients, over all stages.
        """
        done = self.rule.decide(squares, self.units * self.scaler.scale)
        skipped = self.scaler.update(overflow=not done.update.taken)
        self.steps += 1
        self.leave(done.update)
        return StepResult(self.steps, done.learning_rate, done.grad_norm, skipped, done.update.taken)

    def leave(self, update: Update) -> None:
        """Leave an update to the stages; what was accumulated is gone."""
        self.units = self.rows = 0
        self.squares, self.update = None, update

    def told(self) -> dict[str, Any] | None:
        """The update that the stages are told of now, or none."""
        update, self.update = self.update, None
        return None if update is None else asdict(update)

    def state_dict(self) -> dict[str, Any]:
        """Counts, as plain values."""
        return {
            "units": self.units,
            "rows": self.rows,
            "updates": self.rule.steps,
            "scaler": asdict(self.scaler),
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.scaler = LossScaler(**state["scaler"])
        self.rule.steps, self.steps = state["updates"], state["steps"]
        self.units, self.rows = state["units"], state["rows"]
        self.squares = self.update = None


class AdapterStates(dict[str, AdapterState]):
    """The states of an engine's adapters by name, in the order in which these were created."""

    def of(self, name: str) -> AdapterState:
        """The state of an adapter.

        Raises:
            ValueError: if there is none of this name.
        """
        if name not in self:
            raise ValueError(f"no adapter {name!r} in this engine; its adapters: {', '.join(self) or 'none'}")
        return self[name]

    def at_rest(self, name: str) -> AdapterState:
        """The state of an adapter that is not under way.

        Raises:
            ValueError: if there is none of this name, or a batch of it has yet to be finished or evaluated.
        """
        state = self.of(name)
        if state.under_way:
            raise ValueError(
                f"adapter {name!r}: a batch of it is under way; call finish with its future, or take all "
                "results of evaluate_each, first"
            )
        return state

    def updates(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The updates of these adapters that the stages have yet to make, and are told of now."""
        told = {name: self[name].told() for name in names}
        return {name: update for name, update in told.items() if update is not None}
