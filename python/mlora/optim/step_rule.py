"""Decides an optimizer step once for all stages, as Transformers' `Trainer` does, and scales fp16 losses."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

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


def schedule_of(config: OptimConfig) -> Callable[[int], float]:
    """Returns Transformers' factor on the learning rate as a function of the steps taken.

    ValueError if there is no such schedule, its arguments do not fit, or it depends on more than the step.
    """
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import get_scheduler

    _check_schedule_arguments(config)
    stand_in = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
    try:
        scheduler = get_scheduler(
            config.lr_scheduler_type,
            stand_in,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=config.total_steps,
            scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs or {}),
        )
        if not isinstance(scheduler, LambdaLR):
            raise ValueError("depends on more than the step, which is not supported")
        factor: Callable[[int], float] = scheduler.lr_lambdas[0]
        for step in {0, config.warmup_steps, max((config.total_steps or 1) - 1, 0)}:
            if not math.isfinite(factor(step)):
                raise ValueError(f"its factor at step {step} is {factor(step)}")
    except (ValueError, TypeError, ArithmeticError) as error:
        given = f"; lr_scheduler_kwargs: {config.lr_scheduler_kwargs}" if config.lr_scheduler_kwargs else ""
        raise ValueError(f"lr_scheduler_type {config.lr_scheduler_type!r}: {error}{given}") from error
    return factor


def _check_schedule_arguments(config: OptimConfig) -> None:
    """Refuses `lr_scheduler_kwargs` that the schedule does not have, and the lack of those it needs."""
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    functions: dict[str, Any] = {kind.value: make for kind, make in TYPE_TO_SCHEDULER_FUNCTION.items()}
    if config.lr_scheduler_type not in functions:
        return
    parameters = inspect.signature(functions[config.lr_scheduler_type]).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    ours = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    known = {parameter.name: parameter.default for parameter in parameters if parameter.name not in ours}
    given = config.lr_scheduler_kwargs or {}
    what = f"lr_scheduler_kwargs: the schedule {config.lr_scheduler_type!r}"
    for key in given:
        if key not in known:
            raise ValueError(f"{what} has no {key!r}; it has {', '.join(known) or 'none'}")
    for key, default in known.items():
        if default is inspect.Parameter.empty and key not in given:
            raise ValueError(f"{what} needs {key}")


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
