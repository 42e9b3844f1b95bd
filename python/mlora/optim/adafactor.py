"""Adafactor (Shazeer and Stern, 2018) as Transformers has it, with the settings of its Trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.optimization import Adafactor as Transformers

from mlora.optim.optimizer import Optimizer, Shapes, elements


class Adafactor(Optimizer):
    """`adafactor`: the learning rate is the schedule's (`scale_parameter` and `relative_step` are off).

    State of a matrix: means of the squared gradient over its rows and over its columns. State of a vector:
    the means of its squared gradient.
    """

    @staticmethod
    def state_bytes(shapes: Shapes) -> int:
        """Returns the bytes of a row and a column of each matrix, fp32."""
        return 4 * sum(elements(_means(shape)) for shape in shapes)

    @staticmethod
    def step_bytes(shapes: Shapes) -> int:
        """Returns the bytes of the update of the largest Parameter and of what it is made of."""
        return 4 * 3 * max((math.prod(shape) for shape in shapes), default=0)

    def begin(self) -> None:
        """Makes means of zeros before the first step."""
        if not any(self.state):
            self.state = [[p.new_zeros(shape) for shape in _means(p.shape)] for p in self.parameters]

    def step(
        self,
        index: Sequence[int],
        gradients: Sequence[Tensor],
        learning_rate: float,
        scale: float,
        steps: int,
    ) -> None:
        torch._foreach_mul_(list(gradients), scale)
        parameters = [self.parameters[i] for i in index]
        library = Transformers(
            parameters,
            lr=learning_rate,
            weight_decay=self.weight_decay(index),
            scale_parameter=False,
            relative_step=False,
        )
        for i, parameter in zip(index, parameters, strict=True):
            names = ("exp_avg_sq",) if parameter.ndim < 2 else ("exp_avg_sq_row", "exp_avg_sq_col")
            means = zip(names, self.state[i], strict=True)
            library.state[parameter] = {"step": steps, "RMS": 0, **dict(means)}
        library.step()


def _means(shape: Sequence[int]) -> list[Sequence[int]]:
    """Returns the shapes of a Parameter's means: `[..., rows]` and `[..., columns]`."""
    return [shape] if len(shape) < 2 else [shape[:-1], [*shape[:-2], shape[-1]]]
