"""One stage: a module, and what it does with a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LossFn = Callable[[Any, Any], tuple[Tensor, Any]]
"""`(output of the last stage, targets) -> (scalar to differentiate, report)`."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One micro-batch on its way through the stages.

    Attributes:
        inputs: keyword arguments of the first stage's module.
        targets: travels to the last stage, for its loss.
        train: whether a backward pass follows.
    """

    inputs: Mapping[str, Any]
    targets: Any
    train: bool = True


class Stage:
    """A stage that is first and last: its module and its loss are one unit of work.

    Args:
        module: called with a micro-batch's inputs.
        loss_fn: what the last stage does with the module's output.
    """

    def __init__(self, module: nn.Module, loss_fn: LossFn) -> None:
        self.module = module
        self._loss_fn = loss_fn

    def run(self, batch: MicroBatch) -> Any:
        """Forward, loss and, in training, backward; nothing of the micro-batch is kept afterwards.

        Args:
            batch: the micro-batch. In training, gradients are added to the parameters' `grad`.

        Returns:
            The loss function's report.
        """
        with torch.set_grad_enabled(batch.train):
            loss, report = self._loss_fn(self.module(**batch.inputs), batch.targets)
        if batch.train:
            torch.autograd.backward(loss)
        return report
