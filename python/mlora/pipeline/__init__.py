"""Runs a model that is cut into stages. One device is a pipeline of one stage."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .across import Neighbours, StageProcess, connect_neighbours
    from .driver import Driver
    from .order import RoundPosition
    from .runner import PipelineError
    from .runtime import Pipeline
    from .stage import Hooks, ModuleCall, Worker, verb

_HOMES = {
    "Driver": "driver",
    "Hooks": "stage",
    "ModuleCall": "stage",
    "Neighbours": "across",
    "Pipeline": "runtime",
    "PipelineError": "runner",
    "RoundPosition": "order",
    "StageProcess": "across",
    "Worker": "stage",
    "connect_neighbours": "across",
    "verb": "stage",
}

__all__ = [
    "Driver",
    "Hooks",
    "ModuleCall",
    "Neighbours",
    "Pipeline",
    "PipelineError",
    "RoundPosition",
    "StageProcess",
    "Worker",
    "connect_neighbours",
    "verb",
]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import, and schedules and their simulator do not need it
    if name in _HOMES:
        return getattr(import_module(f"mlora.pipeline.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'mlora.pipeline' has no attribute {name!r}")
