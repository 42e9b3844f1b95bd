"""One adapter's optimizer, as Transformers' `Trainer` has it: what is decided once, what each stage does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

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


class AdapterOptimizer:
    """Optimizer of one adapter's Parameters on one stage; gradients come as sums over tokens.

    AdamW: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, in PyTorch's form and by
    PyTorch's own functions.

    Args:
        parameters: the adapter's Parameters that are on this stage, by name.
        config: see `OptimConfig`.

    Attributes:
        steps: updates made.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimConfig) -> None:
        self.config = config
        self.steps = 0
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._moments: list[tuple[Tensor, Tensor]] = []
        self._blank: list[tuple[nn.Parameter, Tensor]] = []

    def squares(self) -> Tensor:
        """Sum of the squares of the gradients: `[]` fp64, on their device."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients:
            return torch.zeros((), dtype=torch.float64)
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).double().square()

    @torch.no_grad()
    def apply(self, update: Update) -> None:
        """Make an update, and drop the gradients."""
        if update.taken:
            if not self._moments and self.config.optim != "sgd":
                self._moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self._parameters]
            index = [i for i, p in enumerate(self._parameters) if p.grad is not None]
            parameters: list[Tensor] = [self._parameters[i] for i in index]
            gradients: list[Tensor] = [p.grad for p in parameters]  # type: ignore[misc]
            if index:
                self._update(index, parameters, gradients, update.learning_rate, update.scale)
            self.steps += 1
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget what was accumulated."""
        for parameter in self._parameters:
            parameter.grad = None
        self._blank = []

    def hold_gradients(self) -> None:
        """Make the gradients that are not there yet, of zeros: backward finds room for all of them."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                self._blank.append((parameter, parameter.grad))

    def drop_blank_gradients(self) -> None:
        """Forget what `hold_gradients` made and no backward added to: such Parameters are not updated."""
        for parameter, gradient in self._blank:
            if parameter.grad is gradient and gradient._version == 0:
                parameter.grad = None
        self._blank = []

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

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Both moments by the Parameter's name, as copies; nothing before the first update, or for SGD."""
        pairs = zip(self._names, self._moments, strict=False)
        return {name: [tensor.clone() for tensor in pair] for name, pair in pairs}

    def load_state_dict(self, steps: int, moments: Mapping[str, Sequence[Tensor]]) -> None:
        """Take over what `state_dict` gave, here or on other stages.

        Args:
            steps: updates made.
            moments: those of this stage's Parameters, and maybe of others.

        Raises:
            ValueError: if it is the state of other Parameters.
        """
        for name, parameter in zip(self._names, self._parameters, strict=True):
            shape = list(moments[name][0].shape) if name in moments else None
            if moments and shape != list(parameter.shape):
                raise ValueError("state: the optimizer's moments are those of other Parameters")
        self.steps = steps
        # The kernels ask for moments with the strides of the Parameter.
        self._moments = [
            (torch.zeros_like(p).copy_(moments[name][0]), torch.zeros_like(p).copy_(moments[name][1]))
            for name, p in zip(self._names, (p.detach() for p in self._parameters), strict=True)
            if moments
        ]
