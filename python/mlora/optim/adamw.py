"""AdamW by PyTorch's own functions (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from mlora.optim.optimizer import Optimizer, Shapes, elements


class AdamW(Optimizer):
    """`adamw_torch`: PyTorch's foreach implementation. State: the first and the second moment, fp32."""

    @staticmethod
    def state_bytes(shapes: Shapes) -> int:
        """Returns the bytes of two fp32 moments."""
        return 2 * 4 * elements(shapes)

    @staticmethod
    def step_bytes(shapes: Shapes) -> int:
        """Returns the bytes of the roots of all second moments, which PyTorch makes at once."""
        return 4 * elements(shapes)

    def begin(self) -> None:
        """Makes moments of zeros before the first step."""
        if not any(self.state):
            self.state = [[torch.zeros_like(p), torch.zeros_like(p)] for p in self.parameters]

    def step(
        self,
        index: Sequence[int],
        gradients: Sequence[Tensor],
        learning_rate: float,
        scale: float,
        steps: int,
    ) -> None:
        parameters = [self.parameters[i] for i in index]
        first, second = ([self.state[i][order] for i in index] for order in (0, 1))
        config = self.config
        values = {
            "amsgrad": False,
            "beta1": config.adam_beta1,
            "beta2": config.adam_beta2,
            "lr": learning_rate,
            "weight_decay": config.weight_decay,
            "eps": config.adam_epsilon,
            "maximize": False,
        }
        self._update([parameters, list(gradients), first, second], values, scale, steps)

    def _update(self, tensors: list[list[Tensor]], values: dict[str, Any], scale: float, steps: int) -> None:
        """Calls PyTorch's function with Parameters, gradients, first and second moments."""
        parameters, gradients, first, second = tensors
        torch._foreach_mul_(gradients, scale)
        counts = list(torch.full((len(parameters),), float(steps)).unbind())
        adamw(parameters, gradients, first, second, [], counts, foreach=True, **values)


class FusedAdamW(AdamW):
    """`adamw_torch_fused`: PyTorch's fused kernel, which needs no memory beside the moments."""

    @staticmethod
    def step_bytes(shapes: Shapes) -> int:
        return 0

    def _update(self, tensors: list[list[Tensor]], values: dict[str, Any], scale: float, steps: int) -> None:
        # torch.optim.AdamW(fused=True) calls this kernel too, but takes twice the time for 28 small tensors.
        parameters, gradients, first, second = tensors
        device = parameters[0].device
        counts = [torch.full((), steps + 1.0, device=device)] * len(parameters)
        divisor = torch.full((), 1.0 / scale, device=device)
        torch._fused_adamw_(parameters, gradients, first, second, [], counts, grad_scale=divisor, **values)
