"""One adapter's optimizer on one stage; gradients are sums over tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mlora.optim.optim_config import OptimConfig
from mlora.optim.registry import optimizer_kind
from mlora.optim.step_rule import Update


class AdapterOptimizer:
    """The gradients of one adapter's Parameters on one stage, and their optimizer.

    Attributes:
        steps: updates made.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimConfig) -> None:
        self.steps = 0
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._optimizer = optimizer_kind(config.optim)(self._parameters, config)
        self._blank: list[tuple[nn.Parameter, Tensor]] = []

    def squares(self) -> Tensor:
        """Returns the sum of the squares of the gradients: `[]` fp64, on their device."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients:
            return torch.zeros((), dtype=torch.float64)
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).double().square()

    @torch.no_grad()
    def apply(self, update: Update) -> None:
        """Makes an update, and drops the gradients."""
        if update.taken:
            self._optimizer.begin()
            index = [i for i, p in enumerate(self._parameters) if p.grad is not None]
            gradients: list[Tensor] = [self._parameters[i].grad for i in index]  # type: ignore[misc]
            if index:
                self._optimizer.step(index, gradients, update.learning_rate, update.scale, self.steps)
            self.steps += 1
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._blank = []

    def hold_gradients(self) -> None:
        """Makes the missing gradients, of zeros, so that backward finds room for all of them."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                self._blank.append((parameter, parameter.grad))

    def drop_blank_gradients(self) -> None:
        """Drops gradients of `hold_gradients` that no backward added to; their Parameters are not updated."""
        for parameter, gradient in self._blank:
            if parameter.grad is gradient and gradient._version == 0:
                parameter.grad = None
        self._blank = []

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Returns copies of the optimizer's state by Parameter name; leaves out Parameters without state."""
        pairs = zip(self._names, self._optimizer.state, strict=True)
        return {name: [tensor.clone() for tensor in tensors] for name, tensors in pairs if tensors}

    def load_state_dict(self, steps: int, state: Mapping[str, Sequence[Tensor]]) -> None:
        """Loads the result of `state_dict`, from this stage or others; it may hold other Parameters, too.

        ValueError if `state` lacks a Parameter of this stage or a shape differs.
        """
        if state and not set(self._names) <= set(state):
            raise ValueError("state: the optimizer's moments do not fit the adapter's Parameters")
        self._optimizer.load_state([state.get(name, ()) for name in self._names])
        self.steps = steps
