"""Running a model cut into stages. One device is a pipeline of one stage."""

from .driver import Driver, Result
from .order import Place
from .runner import PipelineError
from .runtime import Pipeline
from .stage import Hooks, LossFn, MicroBatch, Stage

__all__ = ["Driver", "Hooks", "LossFn", "MicroBatch", "Pipeline", "PipelineError", "Place", "Result", "Stage"]
