"""The parts of the benchmark that train all weights of a model."""

from __future__ import annotations

from types import ModuleType

from offload import full_capacity, gradients, largest

FULL: dict[str, ModuleType] = {
    "optimizer": gradients,
    "largest": largest,
    "full": full_capacity,
}
