"""AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
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
    ) -> bool | None:
        parameters = [self.parameters[i] for i in index]
        first, second = ([self.state[i][order] for i in index] for order in (0, 1))
        decay = self.weight_decay(index)
        return self._update([list(gradients), parameters, first, second], learning_rate, decay, scale, steps)

    def _update(
        self, tensors: list[list[Tensor]], learning_rate: float, decay: float, scale: float, steps: int
    ) -> bool | None:
        """Updates Parameters by gradients, first and second moments; returns what `step` returns."""
        gradients, parameters, first, second = tensors
        torch._foreach_mul_(gradients, scale)
        counts = list(torch.full((len(parameters),), float(steps), device="cpu").unbind())
        values = self._torch_values(learning_rate, decay)
        adamw(parameters, gradients, first, second, [], counts, foreach=True, **values)
        return None

    def _torch_values(self, learning_rate: float, decay: float) -> dict[str, Any]:
        config = self.config
        return {
            "amsgrad": False,
            "beta1": config.adam_beta1,
            "beta2": config.adam_beta2,
            "lr": learning_rate,
            "weight_decay": decay,
            "eps": config.adam_epsilon,
            "maximize": False,
        }


class FusedAdamW(AdamW):
    """`adamw_torch_fused`: one kernel for all Parameters, which needs no memory beside the moments.

    On a GPU it is PyTorch's. On a CPU it is ours, which also clears the gradients; PyTorch's makes a parallel
    region for each of many small tensors.
    """

    @staticmethod
    def step_bytes(shapes: Shapes) -> int:
        return 0

    def _update(
        self, tensors: list[list[Tensor]], learning_rate: float, decay: float, scale: float, steps: int
    ) -> bool | None:
        gradients, parameters, first, second = tensors
        if self.compiled:
            config = self.config
            betas = config.adam_beta1, config.adam_beta2
            eps, step = config.adam_epsilon, steps + 1
            torch.ops.mlora_ext.adamw(*tensors, [], learning_rate, *betas, eps, decay, step, scale, True, 0)
            increment_version([*parameters, *gradients])
            return True
        # torch.optim.AdamW(fused=True) calls this kernel too, but takes twice the time for 28 small tensors.
        device = parameters[0].device
        counts = [torch.full((), steps + 1.0, device=device)] * len(parameters)
        divisor = torch.full((), 1.0 / scale, device=device)
        values = self._torch_values(learning_rate, decay)
        torch._fused_adamw_(parameters, gradients, first, second, [], counts, grad_scale=divisor, **values)
        return None
