"""Dynamic loss scaling for fp16, one scale per adapter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_INITIAL, _SMALLEST, _LARGEST = 2.0**10, 1.0, 2.0**20
_GROWTH_INTERVAL = 2000


@dataclass
class LossScaler:
    """The scale of an adapter's gradients: doubles after 2000 good steps, halves after an overflow.

    Gradients are sums over tokens, so the scale begins lower than PyTorch's 65536, which is for means.

    Attributes:
        enabled: whether the base computes in fp16.
        scale: factor on the loss.
        good_steps: steps without overflow since the scale last changed.
    """

    enabled: bool
    scale: float = 1.0
    good_steps: int = 0

    @classmethod
    def for_dtype(cls, dtype: torch.dtype) -> LossScaler:
        """Returns a scaler that is on for fp16 and off otherwise."""
        return cls(True, _INITIAL) if dtype is torch.float16 else cls(False)

    def update(self, *, overflow: bool) -> bool:
        """Records a step; returns whether an overflow lowered the scale, so the next step may succeed."""
        if not self.enabled:
            return False
        if overflow:
            lowered = self.scale > _SMALLEST
            self.scale, self.good_steps = max(self.scale / 2, _SMALLEST), 0
            return lowered
        self.good_steps += 1
        if self.good_steps == _GROWTH_INTERVAL:
            self.scale, self.good_steps = min(self.scale * 2, _LARGEST), 0
        return False
