"""Running a model cut into stages. One device is a pipeline of one stage."""

from .runtime import Pipeline
from .stage import LossFn, MicroBatch, Stage

__all__ = ["LossFn", "MicroBatch", "Pipeline", "Stage"]
