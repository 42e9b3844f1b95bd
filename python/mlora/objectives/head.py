"""A model's head: the frozen layer that makes logits, and the computation after it.

Shapes: D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlora_ext.frozen.weight import FrozenWeight


@dataclass(frozen=True)
class LogitRule:
    """A model's computation on its head's output: `softcap · tanh(scale · z / softcap)`.

    Attributes:
        scale: factor (Cohere's `logit_scale`, the inverse of Granite's `logits_scaling`).
        softcap: bound, or None (Gemma's `final_logit_softcapping`).
    """

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitRule:
        """Reads the rule from a model's config."""
        scale = getattr(config, "logit_scale", None)
        scale = 1.0 if scale is None else float(scale)
        divisor = getattr(config, "logits_scaling", None)
        scale = scale if divisor is None else scale / float(divisor)
        return cls(scale, getattr(config, "final_logit_softcapping", None))

    def apply(self, logits: Tensor) -> Tensor:
        """Returns the model's logits from its head's output; differentiable."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


@dataclass(frozen=True, eq=False)
class Head:
    """A frozen head: W `[V, D]`, bias `[V]` or None, and the computation after the linear layer."""

    frozen: FrozenWeight
    bias: Tensor | None
    rule: LogitRule
