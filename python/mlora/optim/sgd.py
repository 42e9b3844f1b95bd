"""Stochastic gradient descent without momentum, as PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlora.optim.optimizer import Optimizer, Shapes


class Sgd(Optimizer):
    """`sgd`: has no state."""

    @staticmethod
    def state_bytes(shapes: Shapes) -> int:
        return 0

    def step(
        self,
        index: Sequence[int],
        gradients: Sequence[Tensor],
        learning_rate: float,
        scale: float,
        steps: int,
    ) -> None:
        parameters, scaled = [self.parameters[i] for i in index], list(gradients)
        torch._foreach_mul_(scaled, scale)
        if decay := self.weight_decay(index):
            torch._foreach_add_(scaled, parameters, alpha=decay)
        torch._foreach_add_(parameters, scaled, alpha=-learning_rate)
