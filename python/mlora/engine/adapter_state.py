"""What an engine knows of an adapter and its batches; the stages hold the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mlora.data.micro_batch import MicroBatch
from mlora.memory.estimate import MemorySample
from mlora.objectives.objective import CrossEntropy, Objective
from mlora.objectives.registry import CROSS_ENTROPY
from mlora.optim.step_rule import LossScaler, StepRule, Update
from mlora_ext.errors import AdapterError


@dataclass(frozen=True)
class BatchResult:
    """An adapter's share of a batch.

    Attributes:
        loss_sum: sum of its losses over units.
        tokens: number of its trained tokens.
        units: what divides the loss: the number of trained tokens, unless its objective says otherwise.
        metrics: sums of the objective's metrics over units.
        counts: what divides those metrics that are not divided by units.
        fault: why its objective or its optimizer failed; empty if neither did. `loss_sum` is NaN then, and
            the adapter has no gradient.
    """

    loss_sum: float
    tokens: int
    units: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    fault: str = ""

    @property
    def loss(self) -> float:
        """The mean loss per unit, as `Trainer` reports it; nan if nothing was trained."""
        return self.loss_sum / self.units if self.units else math.nan

    @property
    def finite(self) -> bool:
        """Whether `loss_sum` is finite."""
        return math.isfinite(self.loss_sum)

    def plus(self, other: BatchResult) -> BatchResult:
        """Returns the sum of both results.

        Args:
            other: the same adapter's share of another batch.
        """
        metrics, counts = added(self.metrics, other.metrics), added(self.counts, other.counts)
        loss, tokens = self.loss_sum + other.loss_sum, self.tokens + other.tokens
        fault = self.fault or other.fault
        return BatchResult(loss, tokens, self.units + other.units, metrics, counts, fault)

    def mean_metrics(self) -> dict[str, float]:
        """Returns the objective's metrics per unit, or per what divides them."""
        return means(self.metrics, self.counts, self.units)


def added(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Returns the sums of two sets of numbers by name."""
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in {**first, **second}}


def means(totals: Mapping[str, float], counts: Mapping[str, float], units: int) -> dict[str, float]:
    """Returns totals divided by their counts, or by `units` where there is none; NaN if that is zero."""
    divisors = {name: counts.get(name, units) for name in totals}
    return {name: total / divisors[name] if divisors[name] else math.nan for name, total in totals.items()}


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
    """The counts of one adapter, and decisions that the stages have not been told yet.

    Attributes:
        replica: the index of its pipeline.
        objective: what it is trained for.
        objective_spec: what the last stage makes the objective of: plain values.
        start: the name under which the weights that it began with stay beside it, for its objective; or None.
            Adapters that began with equal weights share them.
        start_digest: of these weights.
        steps: optimizer steps, taken or skipped.
        units: what divides its gradient, since the last step.
        rows: rows since the last step.
        squares: sum of its squared gradients, if it came back with a micro-batch.
        update: what the stages must do just before the adapter's next forward.
        fault: why its optimizer failed on a stage; empty if it did not.
    """

    replica: int
    rule: StepRule
    scaler: LossScaler
    objective: Objective = field(default_factory=CrossEntropy)
    objective_spec: Any = CROSS_ENTROPY
    start: str | None = None
    start_digest: str | None = None
    steps: int = 0
    units: int = 0
    rows: int = 0
    squares: float | None = None
    update: Update | None = None
    fault: str = ""

    def entered(self, rows: int, units: int) -> None:
        """Counts a micro-batch that has entered the pipeline."""
        self.rows += rows
        self.units += units
        self.squares = None

    def decide(self, squares: float) -> StepResult:
        """Decides a step on what was accumulated; `squares` sums the squared gradients of all stages."""
        rate, norm, update = self.rule.decide(squares, self.units * self.scaler.scale)
        skipped = self.scaler.update(overflow=not update.taken)
        self.steps += 1
        self.leave(update)
        return StepResult(self.steps, rate, norm, skipped, update.taken)

    def leave(self, update: Update) -> None:
        """Leaves an update to the stages and clears what was accumulated."""
        self.units = self.rows = 0
        self.squares, self.update = None, update

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts as plain values."""
        return {
            "units": self.units,
            "rows": self.rows,
            "updates": self.rule.steps,
            "scaler": asdict(self.scaler),
            "steps": self.steps,
            **({} if self.start_digest is None else {"start_digest": self.start_digest}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned."""
        self.scaler = LossScaler(**state["scaler"])
        self.rule.steps, self.steps = state["updates"], state["steps"]
        self.units, self.rows = state["units"], state["rows"]
        self.squares = self.update = None


class BatchFuture:
    """A batch that is under way.

    Attributes:
        parts: its micro-batches, each with its number in the pipeline, or None if it has nothing to compute.
        ends: adapters whose accumulation it completes.
        bounds: under a memory limit, what each micro-batch takes at most on each stage.
        owners: the adapters whose weights it uses.
        measured: after `finish`, its micro-batches' memory, if that was asked for.
    """

    def __init__(
        self,
        parts: Sequence[tuple[MicroBatch, int | None]],
        ends: Sequence[str] = (),
        bounds: Sequence[Sequence[float]] = (),
    ) -> None:
        self.parts, self.ends, self.bounds = parts, ends, bounds
        self.owners = {name for batch, _ in parts for name in batch.all_owners}
        self.measured: list[MemorySample] = []

    @property
    def last(self) -> int:
        """The number of its last micro-batch, 0 if it has none."""
        return max((number for _, number in self.parts if number is not None), default=0)


class AdapterStates(dict[str, AdapterState]):
    """An engine's adapter states by name, in the order of creation.

    Attributes:
        under_way: batches and evaluations that have entered and not been finished.
    """

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[BatchFuture] = []

    def landed(self, future: BatchFuture) -> None:
        """Forgets a batch that has come back, or will not."""
        if future in self.under_way:
            self.under_way.remove(future)

    def of(self, name: str) -> AdapterState:
        """Returns an adapter's state; raises ValueError for an unknown name."""
        if not isinstance(name, str) or name not in self:
            known = ", ".join(self.named) or "none"
            raise ValueError(f"no adapter {name!r} in this engine; its adapters: {known}")
        return self[name]

    @property
    def named(self) -> list[str]:
        """The names that the engine's user has given."""
        starts = {state.start for state in self.values()}
        return [name for name in self if name not in starts]

    def users_of(self, start: str) -> list[str]:
        """Returns the adapters that began with the weights of this name."""
        return [name for name, state in self.items() if state.start == start]

    def at_rest(self, name: str) -> AdapterState:
        """Returns an adapter's state; raises ValueError if a batch of it is under way."""
        state = self.of(name)
        if any(name in future.owners for future in self.under_way):
            raise AdapterError(
                name,
                "a batch of it is under way; call finish with its future, or take all "
                "results of evaluate_each, first",
            )
        return state

    def updates(self, names: Sequence[str]) -> dict[str, Update]:
        """Returns the updates that the stages have yet to make for these adapters, and clears them."""
        told = {}
        for name in names:
            update, self[name].update = self[name].update, None
            if update is not None:
                told[name] = update
        return told
