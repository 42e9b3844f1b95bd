"""One adapter's optimizer, learning rate schedule and clipping, as Transformers' `Trainer` has them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

OptimName = Literal["adamw_torch", "adamw_torch_fused", "sgd"]


@dataclass(frozen=True)
class OptimConfig:
    """How one adapter is optimised. Names and defaults are those of `transformers.TrainingArguments`.

    Attributes:
        learning_rate: peak learning rate.
        optim: `adamw_torch`, `adamw_torch_fused` or `sgd`.
        weight_decay: decoupled for AdamW; applies to every adapter weight.
        adam_beta1: decay of the first moment.
        adam_beta2: decay of the second moment.
        adam_epsilon: added to the denominator.
        max_grad_norm: bound of the gradient's norm; 0 = no clipping.
        lr_scheduler_type: a name of `transformers.SchedulerType` that is a function of the step.
        lr_scheduler_kwargs: further arguments of the schedule.
        warmup_steps: steps of linear warm-up.
        total_steps: steps after which the schedule ends; needed by those that end.

    Raises:
        ValueError: naming the field, what was expected and what came.
    """

    learning_rate: float = 5e-5
    optim: OptimName = "adamw_torch"
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: Mapping[str, Any] | None = field(default=None)
    warmup_steps: int = 0
    total_steps: int | None = None

    def __post_init__(self) -> None:
        if self.optim not in get_args(OptimName):
            raise ValueError(f"optim: expected one of {', '.join(get_args(OptimName))}, got {self.optim!r}")
        for name in ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "warmup_steps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: expected a finite number >= 0, got {value}")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a number with 0 <= value < 1, got {getattr(self, name)}")


def schedule_of(config: OptimConfig) -> Callable[[int], float]:
    """The factor on the learning rate as a function of the steps taken, from `transformers.get_scheduler`.

    Raises:
        ValueError: if there is no such schedule, its arguments do not fit, or it needs more than the step.
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
            raise ValueError("is no function of the step alone")
        factor: Callable[[int], float] = scheduler.lr_lambdas[0]
        for step in {0, config.warmup_steps, max((config.total_steps or 1) - 1, 0)}:
            if not math.isfinite(factor(step)):
                raise ValueError(f"its factor at step {step} is {factor(step)}")
    except (ValueError, TypeError, ArithmeticError) as error:
        given = f"; lr_scheduler_kwargs: {config.lr_scheduler_kwargs}" if config.lr_scheduler_kwargs else ""
        raise ValueError(f"lr_scheduler_type {config.lr_scheduler_type!r}: {error}{given}") from error
    return factor


def _check_schedule_arguments(config: OptimConfig) -> None:
    """Refuse `lr_scheduler_kwargs` that the schedule does not have, and the lack of those it needs."""
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


@dataclass(frozen=True)
class OptimStep:
    """What one optimizer step did.

    Attributes:
        learning_rate: that of this step.
        grad_norm: norm of the mean gradient before clipping.
        taken: whether the weights changed; False where the gradient was not finite.
    """

    learning_rate: float
    grad_norm: float
    taken: bool


class AdapterOptimizer:
    """Optimizer of one adapter's Parameters; gradients come as sums over tokens.

    AdamW: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, in PyTorch's form and by
    PyTorch's own functions. Clipping as `torch.nn.utils.clip_grad_norm_`, over the adapter's gradient.

    Args:
        parameters: the adapter's Parameters.
        config: see `OptimConfig`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], config: OptimConfig) -> None:
        self.config = config
        self.steps = 0
        self._parameters = list(parameters)
        self._schedule = schedule_of(config)
        self._moments: list[tuple[Tensor, Tensor]] = []

    @property
    def learning_rate(self) -> float:
        """That of the next step."""
        return self.config.learning_rate * self._schedule(self.steps)

    @torch.no_grad()
    def step(self, divisor: float) -> OptimStep:
        """Divide the summed gradients, clip, step, advance the schedule, and drop the gradients.

        Args:
            divisor: trained tokens that the gradients are the sum over, times the loss scale.

        Returns:
            What was done. A gradient that is not finite changes nothing.
        """
        index = [i for i, p in enumerate(self._parameters) if p.grad is not None]
        parameters: list[Tensor] = [self._parameters[i] for i in index]
        gradients: list[Tensor] = [p.grad for p in parameters]  # type: ignore[misc]
        norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))) / divisor
        rate = self.learning_rate
        if math.isfinite(norm):
            bound = self.config.max_grad_norm
            factor = min(1.0, bound / (norm + 1e-6)) if bound else 1.0
            self._update(index, parameters, gradients, rate, factor / divisor)
            self.steps += 1
        self.drop_gradients()
        return OptimStep(rate, norm, math.isfinite(norm))

    def drop_gradients(self) -> None:
        """Forget what was accumulated."""
        for parameter in self._parameters:
            parameter.grad = None

    def _update(
        self, index: list[int], parameters: list[Tensor], gradients: list[Tensor], rate: float, scale: float
    ) -> None:
        """One update by `scale` times the gradients."""
        config = self.config
        if config.optim == "sgd":
            torch._foreach_mul_(gradients, scale)
            if config.weight_decay:
                torch._foreach_add_(gradients, parameters, alpha=config.weight_decay)
            torch._foreach_add_(parameters, gradients, alpha=-rate)
            return
        if not self._moments:
            self._moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self._parameters]
        first, second = ([self._moments[i][order] for i in index] for order in (0, 1))
        values: dict[str, Any] = {
            "amsgrad": False,
            "beta1": config.adam_beta1,
            "beta2": config.adam_beta2,
            "lr": rate,
            "weight_decay": config.weight_decay,
            "eps": config.adam_epsilon,
            "maximize": False,
        }
        device = parameters[0].device
        if config.optim == "adamw_torch_fused":
            # What torch.optim.AdamW(fused=True) calls: through it, 28 small tensors cost twice the time.
            count = torch.tensor(self.steps + 1.0, device=device)
            divisor = torch.tensor(1.0 / scale, device=device)
            steps = [count] * len(index)
            torch._fused_adamw_(parameters, gradients, first, second, [], steps, grad_scale=divisor, **values)
            return
        torch._foreach_mul_(gradients, scale)
        counts = list(torch.full((len(index),), float(self.steps)).unbind())
        adamw(parameters, gradients, first, second, [], counts, foreach=True, **values)

    def state_dict(self) -> dict[str, Any]:
        """Steps taken and moments, as copies."""
        return {
            "steps": self.steps,
            "moments": [[tensor.contiguous().clone() for tensor in pair] for pair in self._moments],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ValueError: if it is the state of other Parameters.
        """
        moments = state["moments"]
        shapes = [list(p.shape) for p in self._parameters]
        if moments and [list(pair[0].shape) for pair in moments] != shapes:
            raise ValueError("state: the optimizer's moments are those of other Parameters")
        self.steps = state["steps"]
        # The kernels ask for moments with the strides of the Parameter.
        self._moments = [
            (torch.zeros_like(p).copy_(pair[0]), torch.zeros_like(p).copy_(pair[1]))
            for p, pair in zip((p.detach() for p in self._parameters), moments, strict=False)
        ]
