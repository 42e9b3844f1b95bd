"""SLEEP KERNELS: stages whose forward and backward compute nothing and sleep.

With them a pipeline of more stages than the machine has cores can be timed.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class SleepingStage(nn.Module):
    """Sleeps in forward and in backward, and hands its input on.

    Args:
        forward: seconds.
        backward: seconds.
    """

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self._seconds = forward, backward
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, given: Tensor, **_: Any) -> Tensor:
        """`[n]` to `[n]`."""
        return _Sleep.apply(given * self.weight, *self._seconds)  # type: ignore[no-any-return]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        time.sleep(ctx.seconds)
        return dy, None, None


class NothingLearned:
    """Stands where adapters are updated."""

    def step(self, adapter: int) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""
