"""Learning-rate schedules: those of Transformers, as functions of the step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from mlora.optim.optim_config import OptimConfig


def schedule_of(config: OptimConfig) -> Callable[[int], float]:
    """Returns Transformers' factor on the learning rate as a function of the steps taken.

    ValueError if there is no such schedule, its arguments do not fit, or it depends on more than the step.
    """
    _check_arguments(config)
    try:
        factor = _of_transformers(config)
        for step in {0, config.warmup_steps, max((config.total_steps or 1) - 1, 0)}:
            if not math.isfinite(factor(step)):
                raise ValueError(f"its factor at step {step} is {factor(step)}")
    except (ValueError, TypeError, ArithmeticError) as error:
        if config.total_steps is None and "num_training_steps" in str(error):
            error = ValueError("needs total_steps, the step at which it ends")
        given = f"; lr_scheduler_kwargs: {config.lr_scheduler_kwargs}" if config.lr_scheduler_kwargs else ""
        raise ValueError(f"lr_scheduler_type {config.lr_scheduler_type!r}: {error}{given}") from error
    return factor


def _of_transformers(config: OptimConfig) -> Callable[[int], float]:
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import get_scheduler

    scheduler = get_scheduler(
        config.lr_scheduler_type,
        torch.optim.SGD([torch.zeros(1, device="cpu")], lr=config.learning_rate),
        num_warmup_steps=config.warmup_steps,
        num_training_steps=config.total_steps,
        scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs or {}),
    )
    if not isinstance(scheduler, LambdaLR):
        raise ValueError("depends on more than the step, which is not supported")
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return factor


def _check_arguments(config: OptimConfig) -> None:
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
