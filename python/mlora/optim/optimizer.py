"""The interface of an optimizer. To add one, write one class: see `Optimizer`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from mlora.optim.optim_config import OptimConfig

Shapes = Sequence[Sequence[int]]


class Optimizer(ABC):
    """The optimizer of one adapter's Parameters on one stage.

    The learning rate and a factor on the gradients (clipping, tokens and loss scale) are decided once for all
    stages and passed to `step`. Register a class with `mlora.optim.registry.register_optimizer`.

    Args:
        parameters: the adapter's Parameters on this stage, fp32.
        config: the adapter's settings.

    Attributes:
        state: for each Parameter, the tensors that last between steps, such as its moments; empty lists
            before the first step.

    Example:
        >>> class Lion(Optimizer):
        ...     def step(self, index, gradients, learning_rate, scale, steps): ...
        ...     @staticmethod
        ...     def state_bytes(shapes): ...
        >>> register_optimizer("lion", Lion)
    """

    def __init__(self, parameters: Sequence[Tensor], config: OptimConfig) -> None:
        self.parameters, self.config = list(parameters), config
        self.state: list[list[Tensor]] = [[] for _ in self.parameters]

    def begin(self) -> None:  # noqa: B027 - some have no state
        """Makes `state` before a step, if it is not there yet."""

    @abstractmethod
    def step(
        self,
        index: Sequence[int],
        gradients: Sequence[Tensor],
        learning_rate: float,
        scale: float,
        steps: int,
    ) -> None:
        """Makes a step on some of the Parameters, in place.

        Args:
            index: indices of the Parameters that have a gradient.
            gradients: their gradients, as sums over tokens; they may be overwritten.
            learning_rate: the learning rate of this step.
            scale: factor on the gradients.
            steps: number of steps made before.
        """

    @staticmethod
    @abstractmethod
    def state_bytes(shapes: Shapes) -> int:
        """Returns the bytes of `state` for Parameters of these shapes, after the first step."""

    @staticmethod
    def step_bytes(shapes: Shapes) -> int:
        """Returns the bytes that a step takes temporarily, for Parameters of these shapes. Default: 0."""
        return 0

    def load_state(self, state: Sequence[Sequence[Tensor]]) -> None:
        """Copies a `state` that was saved before.

        Args:
            state: for each Parameter, its tensors.

        Raises:
            ValueError: it is the state of other Parameters.
        """
        for parameter, tensors in zip(self.parameters, state, strict=True):
            if any(tensor.shape != parameter.shape for tensor in tensors):
                raise ValueError("state: the optimizer's moments do not fit the adapter's Parameters")
        # kernels ask for moments with the strides of the Parameter
        self.state = [
            [torch.zeros_like(parameter).copy_(tensor) for tensor in tensors]
            for parameter, tensors in zip(self.parameters, state, strict=True)
        ]


def elements(shapes: Shapes) -> int:
    """Returns the number of elements of tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes)
