"""Running a model cut into stages. One device is a pipeline of one stage."""

from .beats import Fault
from .groups import Link, Neighbours, neighbour_groups
from .runtime import Pipeline
from .stage import LossFn, MicroBatch, Stage
from .watch import Watch
from .world import PeerError, World

__all__ = [
    "Fault",
    "Link",
    "LossFn",
    "MicroBatch",
    "Neighbours",
    "PeerError",
    "Pipeline",
    "Stage",
    "Watch",
    "World",
    "neighbour_groups",
]
