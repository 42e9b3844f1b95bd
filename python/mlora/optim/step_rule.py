"""Decides an optimizer step once for all stages, as Transformers' `Trainer` does, and scales fp16 losses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mlora.optim.optim_config import OptimConfig
from mlora.optim.schedules import schedule_of
from mlora.records import record


@record
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

    def planned(self, divisor: float) -> Update | None:
        """Returns the update that `decide` will return, or None if it depends on the gradient's norm."""
        if self.config.max_grad_norm:
            return None
        return Update(self.config.learning_rate * self._schedule(self.steps), 1.0 / divisor, True)

    def decide(self, squares: float, divisor: float) -> tuple[float, float, Update]:
        """Decides a step and advances the schedule; a gradient that is not finite changes nothing.

        Args:
            squares: sum of the squares of the summed gradient, over all stages.
            divisor: number of trained tokens in the sum, times the loss scale.

        Returns:
            The learning rate, the norm of the mean gradient before clipping, and the stages' update.
        """
        rate = self.config.learning_rate * self._schedule(self.steps)
        norm = math.sqrt(squares) / divisor
        if not math.isfinite(norm):
            return rate, norm, Update()
        bound = self.config.max_grad_norm
        factor = min(1.0, bound / (norm + 1e-6)) if bound else 1.0
        self.steps += 1
        return rate, norm, Update(rate, factor / divisor, True)


_INITIAL, _SMALLEST, _LARGEST = 2.0**10, 1.0, 2.0**20
_GROWTH_INTERVAL = 2000


@dataclass
class LossScaler:
    """The scale of an adapter's gradients: doubles after 2000 good steps, halves after an overflow.

    Gradients are sums over tokens, so the scale begins lower than PyTorch's 65536, which is for means.

    Attributes:
        enabled: whether the base computes in fp16.
        scale: factor on the loss.
        good_steps: steps without overflow since the scale last changed.
    """

    enabled: bool
    scale: float = 1.0
    good_steps: int = 0

    @classmethod
    def for_dtype(cls, dtype: torch.dtype) -> LossScaler:
        """Returns a scaler that is on for fp16 and off otherwise."""
        return cls(True, _INITIAL) if dtype is torch.float16 else cls(False)

    def update(self, *, overflow: bool) -> bool:
        """Records a step; returns whether an overflow lowered the scale, so the next step may succeed."""
        if not self.enabled:
            return False
        if overflow:
            lowered = self.scale > _SMALLEST
            self.scale, self.good_steps = max(self.scale / 2, _SMALLEST), 0
            return lowered
        self.good_steps += 1
        if self.good_steps == _GROWTH_INTERVAL:
            self.scale, self.good_steps = min(self.scale * 2, _LARGEST), 0
        return False
