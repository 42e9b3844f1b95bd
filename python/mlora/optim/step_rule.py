"""What is decided once for all stages of an optimizer step, as Transformers' `Trainer` decides it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlora.optim.learning_rate import schedule_of
from mlora.optim.optim_config import OptimConfig


@dataclass(frozen=True)
class Update:
    """What every stage does with an adapter's gradient.

    Attributes:
        learning_rate: that of this step.
        scale: factor on the summed gradient: clipping, over tokens and loss scale.
        taken: whether the weights change; False drops the gradient, which was not finite or is unwanted.
    """

    learning_rate: float = 0.0
    scale: float = 0.0
    taken: bool = False


@dataclass(frozen=True)
class OptimStep:
    """What one optimizer step does.

    Attributes:
        learning_rate: that of this step.
        grad_norm: norm of the mean gradient before clipping.
        update: for the stages.
    """

    learning_rate: float
    grad_norm: float
    update: Update


class StepRule:
    """What is decided once for all stages: the learning rate, and clipping by the norm of all gradients.

    Clipping as `torch.nn.utils.clip_grad_norm_`, over the adapter's gradient.

    Args:
        config: see `OptimConfig`.

    Raises:
        ValueError: as `schedule_of`.

    Attributes:
        steps: steps taken.
    """

    def __init__(self, config: OptimConfig) -> None:
        self.config = config
        self.steps = 0
        self._schedule = schedule_of(config)

    @property
    def learning_rate(self) -> float:
        """That of the next step."""
        return self.config.learning_rate * self._schedule(self.steps)

    def decide(self, squares: float, divisor: float) -> OptimStep:
        """Decide a step, and advance the schedule.

        Args:
            squares: sum of the squares of the summed gradient, over all stages.
            divisor: trained tokens that the gradients are the sum over, times the loss scale.

        Returns:
            The step. A gradient that is not finite changes nothing.
        """
        rate, norm = self.learning_rate, math.sqrt(squares) / divisor
        if not math.isfinite(norm):
            return OptimStep(rate, norm, Update())
        bound = self.config.max_grad_norm
        factor = min(1.0, bound / (norm + 1e-6)) if bound else 1.0
        self.steps += 1
        return OptimStep(rate, norm, Update(rate, factor / divisor, True))
