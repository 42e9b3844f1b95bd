"""What in the base model looks at the whole batch: batch normalisation, limited experts, routers' losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .routing.route import Route
from .warn_caller import warn_caller


class StaysInEvaluation:
    """Replaces a module's `train` and keeps the module in evaluation mode, from now on.

    An object on the instance, not a method, so that it is copied and pickled with its module.

    Attributes:
        asked: the mode that was asked for last; copies that adapters train have it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.asked = module, module.training
        module.eval()

    def __call__(self, mode: bool = True) -> nn.Module:
        """Returns the module unchanged: the base is frozen, and its statistics are part of it."""
        self.asked = mode
        return self.module


def asked_mode(module: nn.Module) -> bool:
    """Returns the mode that was asked of a module last; it may stay in evaluation mode."""
    stays = module.__dict__.get("train")
    return stays.asked if isinstance(stays, StaysInEvaluation) else module.training


def follow_mode(copied: nn.Module) -> None:
    """Lets the batch normalisations in a copy of a base's module train again."""
    for part in copied.modules():
        mode = asked_mode(part)
        if part.__dict__.pop("train", None) is not None:
            part.train(mode)


def refuse_batch_statistics(model: nn.Module) -> None:
    """Raises ValueError, naming the layer, for a BatchNorm without running statistics."""
    for key, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"layer {key}: {type(module).__name__} with track_running_stats=False uses statistics of the "
                "whole batch, so one adapter's samples would change another's results; replace it by "
                "GroupNorm, or by a BatchNorm with running statistics"
            )


def stop_batch_statistics(model: nn.Module) -> int:
    """Puts every BatchNorm into evaluation mode for good: a batch's mean depends on all its adapters.

    Returns how many there are.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for layer in layers:
        layer.__dict__["train"] = StaysInEvaluation(layer)
    return len(layers)


def warn_of_whole_batches(model: nn.Module, stopped: int) -> None:
    """Warns of `stopped` batch normalisations, and of routers whose capacity depends on the whole batch.

    Switch Transformers' routers count in each sample alone; NLLB's count the batch.
    """
    if stopped:
        warn_caller(
            f"{stopped} batch normalisations of the base model stay in evaluation mode and use their "
            "running statistics: with those of a batch, one adapter's samples would change another's results"
        )
    if any(type(module).__name__ == "NllbMoeTop2Router" for module in model.modules()):
        warn_caller(
            "the experts of this model take a number of tokens that depends on the whole batch, so that one "
            "sample's results depend on the others, whatever their adapters; train adapters in batches of "
            "their own if that matters"
        )


def adds_router_loss(config: Any, asked: bool | None = None) -> bool:
    """Returns whether a model of Transformers adds its routers' auxiliary loss to that of its labels.

    It is computed from the tokens of all samples in a batch. `asked`: the call's own `output_router_logits`.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if asked is None:
        asked = any(getattr(part, "output_router_logits", False) for part in (config, text))
    return bool(asked) and getattr(text, "router_aux_loss_coef", None) != 0


def refuse_router_loss(model: nn.Module, route: Route, kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError for a call whose loss would let one adapter's tokens act on another's gradients."""
    config = getattr(model, "config", None)
    if config is None or kwargs.get("labels") is None or not route.mixed:
        return
    if adds_router_loss(config, kwargs.get("output_router_logits")):
        raise ValueError(
            "output_router_logits: with labels it adds the routers' auxiliary loss, which is computed from "
            "all tokens of the batch, so one adapter's samples would change another's gradients; pass "
            "output_router_logits=False, or give each adapter a batch of its own"
        )
