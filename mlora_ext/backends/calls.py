"""Names and types that the calls of all backends share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

PLAN = ("segments", "scaling", "dropout_p", "dropout_rng", "layer")
"""Names of a plan's tensors, in the order of the operators' arguments; see docs/design.md."""
PlanTensors = tuple[Tensor | None, ...]
Wanted = tuple[bool, bool, bool]
"""Whether dx, dA and dB are wanted."""
Gradients = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Gradients of lora_a and of lora_b."""
