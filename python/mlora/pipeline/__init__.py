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
    "Driver": "driver",
    "FirstStage": "across",
    "Hooks": "stage",
    "LossFn": "stage",
    "MicroBatch": "stage",
    "Neighbours": "neighbours",
    "Pipeline": "runtime",
    "PipelineError": "runner",
    "RoundPosition": "order",
    "Result": "driver",
    "Stage": "stage",
    "connect_neighbours": "neighbours",
    "StageProcess": "across",
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
    if name not in _HOMES:
        raise AttributeError(f"module 'mlora.pipeline' has no attribute {name!r}")
    return getattr(import_module(f"mlora.pipeline.{_HOMES[name]}"), name)
