"""The parts of the benchmark that train all weights of a model."""

from __future__ import annotations

from types import ModuleType

from offload import activations, full_capacity, gradients, largest, swap_size

FULL: dict[str, ModuleType] = {
    "optimizer": gradients,
    "swap": swap_size,
    "activations": activations,
    "largest": largest,
    "full": full_capacity,
}
