"""What an engine knows of an adapter and its batches, beside what the stages have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlora.optim.scaler import LossScaler
from mlora.optim.step_rule import StepRule, Update


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


@dataclass(eq=False)
class AdapterState:
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
        under_way: micro-batches, evaluated ones too, that have entered the pipeline and not come back.
        ending: whether the last of its accumulation is among them.
    """

    replica: int
    rule: StepRule
    scaler: LossScaler
    steps: int = 0
    tokens: int = 0
    rows: int = 0
    squares: float | None = None
    update: Update | None = None
    under_way: int = 0
    ending: bool = False

    def entered(self, rows: int, tokens: int) -> None:
        """Count a micro-batch that has entered the pipeline."""
        self.rows += rows
        self.tokens += tokens
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
