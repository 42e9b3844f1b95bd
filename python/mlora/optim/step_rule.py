"""Decides an optimizer step once for all stages, as Transformers' `Trainer` does."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlora.optim.learning_rate import schedule_of
from mlora.optim.optim_config import OptimConfig


@dataclass(frozen=True)
class Update:
    """What every stage does with an adapter's gradient.

    Attributes:
        scale: factor on the summed gradient: clipping, over tokens and loss scale.
        taken: whether the weights change; False drops the gradient, which was not finite or is unwanted.
    """

    learning_rate: float = 0.0
    scale: float = 0.0
    taken: bool = False


@dataclass(frozen=True)
class OptimStep:
    """The result of one optimizer step.

    Attributes:
        grad_norm: norm of the mean gradient before clipping.
        update: for the stages.
    """

    learning_rate: float
    grad_norm: float
    update: Update


class StepRule:
    """Decides the learning rate and the clipping by the norm of all stages' gradients together.

    Clips as `torch.nn.utils.clip_grad_norm_` does, over the adapter's gradient. ValueError as `schedule_of`.

    Attributes:
        steps: steps taken.
    """

    def __init__(self, config: OptimConfig) -> None:
        self.config = config
        self.steps = 0
        self._schedule = schedule_of(config)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self.config.learning_rate * self._schedule(self.steps)

    def decide(self, squares: float, divisor: float) -> OptimStep:
        """Decides a step and advances the schedule; a gradient that is not finite changes nothing.

        Args:
            squares: sum of the squares of the summed gradient, over all stages.
            divisor: number of trained tokens in the sum, times the loss scale.
        """
        rate, norm = self.learning_rate, math.sqrt(squares) / divisor
        if not math.isfinite(norm):
            return OptimStep(rate, norm, Update())
        bound = self.config.max_grad_norm
        factor = min(1.0, bound / (norm + 1e-6)) if bound else 1.0
        self.steps += 1
        return OptimStep(rate, norm, Update(rate, factor / divisor, True))
