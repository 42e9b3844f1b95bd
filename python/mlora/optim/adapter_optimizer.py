"""One adapter's optimizer on one stage: gradients as sums over tokens, and the update that was decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mlora.optim.optim_config import OptimConfig
from mlora.optim.registry import optimizer_kind
from mlora.optim.step_rule import Update


class AdapterOptimizer:
    """The gradients of one adapter's Parameters on one stage, and the optimizer that takes them.

    Args:
        parameters: the adapter's Parameters that are on this stage, by name.
        config: see `OptimConfig`.

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
        """Sum of the squares of the gradients: `[]` fp64, on their device."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients:
            return torch.zeros((), dtype=torch.float64)
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).double().square()

    @torch.no_grad()
    def apply(self, update: Update) -> None:
        """Make an update, and drop the gradients."""
        if update.taken:
            self._optimizer.begin()
            index = [i for i, p in enumerate(self._parameters) if p.grad is not None]
            gradients: list[Tensor] = [self._parameters[i].grad for i in index]  # type: ignore[misc]
            if index:
                self._optimizer.step(index, gradients, update.learning_rate, update.scale, self.steps)
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

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Returns the optimizer's state by the Parameter's name, as copies; nothing where it has none."""
        pairs = zip(self._names, self._optimizer.state, strict=True)
        return {name: [tensor.clone() for tensor in tensors] for name, tensors in pairs if tensors}

    def load_state_dict(self, steps: int, state: Mapping[str, Sequence[Tensor]]) -> None:
        """Takes over what `state_dict` gave, here or on other stages.

        Args:
            steps: updates made.
            state: of this stage's Parameters, and maybe of others.

        Raises:
            ValueError: it is the state of other Parameters.
        """
        if state and not set(self._names) <= set(state):
            raise ValueError("state: the optimizer's moments are those of other Parameters")
        self._optimizer.load_state([state.get(name, ()) for name in self._names])
        self.steps = steps
