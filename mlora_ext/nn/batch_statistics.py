"""Batch statistics of the base model: normalisation layers are put into evaluation mode, with one warning."""

from __future__ import annotations

import warnings

from torch import nn


class StaysInEvaluation:
    """A module's `train` that keeps it in evaluation mode.

    An object on the instance and not a method, so that it is copied and pickled with its module.

    Args:
        module: put into evaluation mode at once.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        module.eval()

    def __call__(self, mode: bool = True) -> nn.Module:
        """Returns the module, as it was: the base is frozen, and its statistics are part of it."""
        return self.module


def uninstall(model: nn.Module) -> None:
    """Let the layers of a copy that is to be a plain model train again."""
    for module in model.modules():
        if isinstance(vars(module).get("train"), StaysInEvaluation):
            del module.__dict__["train"]
            module.train(model.training)


def refuse_batch_statistics(model: nn.Module) -> None:
    """Refuse layers that know no statistics but those of the batch.

    Raises:
        ValueError: naming the layer.
    """
    for key, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"layer {key}: {type(module).__name__} with track_running_stats=False normalises by the "
                "statistics of the whole batch, which ties its adapters together; replace it by a layer that "
                "keeps running statistics, or by GroupNorm"
            )


def stop_batch_statistics(model: nn.Module) -> None:
    """Put every BatchNorm into evaluation mode for good: a batch's mean ties its adapters together."""
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for layer in layers:
        layer.__dict__["train"] = StaysInEvaluation(layer)
    if layers:
        warnings.warn(
            f"{len(layers)} batch normalisations of the base model stay in evaluation mode and use their "
            "running statistics: those of a batch would tie its adapters together",
            stacklevel=3,
        )
