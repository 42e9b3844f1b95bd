"""Runs a model that is cut into stages. One device is a pipeline of one stage."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .across import FirstStage, StageProcess
    from .driver import Driver, Result
    from .neighbours import Neighbours, connect_neighbours
    from .order import RoundPosition
    from .runner import PipelineError
    from .runtime import Pipeline
    from .stage import Hooks, LossFn, MicroBatch, Stage

_HOMES = {
    "across": ("FirstStage", "StageProcess"),
    "driver": ("Driver", "Result"),
    "neighbours": ("Neighbours", "connect_neighbours"),
    "order": ("RoundPosition",),
    "runner": ("PipelineError",),
    "runtime": ("Pipeline",),
    "stage": ("Hooks", "LossFn", "MicroBatch", "Stage"),
}

__all__ = [
    "Driver",
    "FirstStage",
    "Hooks",
    "LossFn",
    "MicroBatch",
    "Neighbours",
    "Pipeline",
    "PipelineError",
    "Result",
    "RoundPosition",
    "Stage",
    "StageProcess",
    "connect_neighbours",
]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import, and schedules and their simulator do not need it
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"mlora.pipeline.{module}"), name)
    raise AttributeError(f"module 'mlora.pipeline' has no attribute {name!r}")
