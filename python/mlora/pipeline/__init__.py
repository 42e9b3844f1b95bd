"""Running a model cut into stages. One device is a pipeline of one stage."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runtime import Pipeline
    from .stage import LossFn, MicroBatch, Stage

__all__ = ["LossFn", "MicroBatch", "Pipeline", "Stage"]

_HOMES = {"LossFn": "stage", "MicroBatch": "stage", "Pipeline": "runtime", "Stage": "stage"}


def __getattr__(name: str) -> Any:
    # schedules and their simulator need no torch, which takes seconds to import
    if name not in _HOMES:
        raise AttributeError(f"module 'mlora.pipeline' has no attribute {name!r}")
    return getattr(import_module(f"mlora.pipeline.{_HOMES[name]}"), name)
