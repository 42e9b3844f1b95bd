"""Train many LoRA adapters together over one frozen base model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlora.config.run_config import RunConfig
    from mlora.data.record import Sample
    from mlora.engine.engine import Engine
    from mlora.optim.optim_config import OptimConfig
    from mlora.run.run import train
    from mlora.tasks.result import RunResult

__all__ = ["Engine", "OptimConfig", "RunConfig", "RunResult", "Sample", "train"]

_HOMES = {
    "Engine": "engine.engine",
    "OptimConfig": "optim.optim_config",
    "RunConfig": "config.run_config",
    "RunResult": "tasks.result",
    "Sample": "data.record",
    "train": "run.run",
}


def __getattr__(name: str) -> Any:
    # importing torch and Transformers takes seconds; `mlora --help` does without them
    if name not in _HOMES:
        raise AttributeError(f"module 'mlora' has no attribute {name!r}")
    return getattr(import_module(f"mlora.{_HOMES[name]}"), name)
