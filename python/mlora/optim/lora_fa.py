"""LoRA-FA (Zhang et al., arXiv 2308.03303) as PEFT's `create_lorafa_optimizer` has it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft.optimizers.lorafa import LoraFAOptimizer
from torch import Tensor, nn

from mlora.optim.optim_config import OptimConfig
from mlora.optim.optimizer import Optimizer, Shapes, elements


class LoraFA(Optimizer):
    """`lora_fa`: A keeps its initial values; B follows Adam on the gradient `g (A Aᵀ)⁻¹ / scaling²`.

    PEFT computes that product in bf16. Its Adam has the epsilon 1e-6; here it is the config's. State of each
    B, and of Parameters that are not LoRA's, which follow Adam: the first and the second moment.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimConfig) -> None:
        for name in parameters:
            part = _part(name)
            if re.search(r"_lora_[AB]\.", name):
                raise ValueError(
                    f"optim: 'lora_fa' does not serve lora.target_parameters, got {name}; use adamw_torch"
                )
            if part and not (part in ("lora_A", "lora_B") and name.endswith(".weight")):
                raise ValueError(f"optim: 'lora_fa' serves adapters of lora_A and lora_B only, got {name}")
        super().__init__(parameters, config)
        places = {name: i for i, name in enumerate(parameters)}
        self._a = {
            i: places[name.replace(".lora_B.", ".lora_A.")]
            for name, i in places.items()
            if _part(name) == "lora_B"
        }

    @staticmethod
    def trains(name: str) -> bool:
        """Returns False for `lora_A`."""
        return _part(name) != "lora_A"

    @staticmethod
    def state_bytes(shapes: Shapes) -> int:
        """Returns the bytes of two fp32 moments."""
        return 2 * 4 * elements(shapes)

    @staticmethod
    def step_bytes(shapes: Shapes) -> int:
        """Returns the bytes of the projected gradient and of the denominator of the largest B."""
        return 4 * 3 * max((elements([shape]) for shape in shapes), default=0)

    def begin(self) -> None:
        """Makes moments of zeros before the first step."""
        if not any(self.state):
            self.state = [
                [torch.zeros_like(p), torch.zeros_like(p)] if self.trains(name) else []
                for name, p in zip(self._names, self.parameters, strict=True)
            ]

    def step(
        self,
        index: Sequence[int],
        gradients: Sequence[Tensor],
        learning_rate: float,
        scale: float,
        steps: int,
    ) -> None:
        torch._foreach_mul_(list(gradients), scale)
        by_scaling: dict[float, list[int]] = {}
        for i in index:
            by_scaling.setdefault(self.scalings[i], []).append(i)
        groups: Any = [self._group(own, scaling, learning_rate) for scaling, own in by_scaling.items()]
        library: Any = LoraFAOptimizer(groups)
        for i in index:
            first, second = self.state[i]
            if i in self._a:
                library.state[f"{i}.lora"] = {"step": steps, "exp_avg_B": first, "exp_avg_sq_B": second}
            else:
                library.state[f"{i}"] = {"step": steps, "exp_avg": first, "exp_avg_sq": second}
        library.step()

    def _group(self, index: Sequence[int], scaling: float, learning_rate: float) -> dict[str, Any]:
        """Returns PEFT's group for one scaling: each B follows its A; names tell B from other Parameters."""
        config, parameters, names = self.config, [], []
        for i in index:
            if i in self._a:
                parameters.append(self.parameters[self._a[i]])
                names.append(f"{i}.lora_A")
            parameters.append(self.parameters[i])
            names.append(f"{i}.lora_B" if i in self._a else f"{i}")
        return {
            "params": parameters,
            "names": names,
            "scaling_factors": [scaling] * len(names),
            "scaling_factor": scaling,  # PEFT 0.19
            "lr": learning_rate,
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_epsilon,
            "weight_decay": self.weight_decay(index),
        }


def _part(name: str) -> str:
    """Returns what of LoRA a Parameter is, such as `lora_A`; "" if nothing."""
    return next((word for word in name.split(".") if word.startswith("lora_")), "")
