"""What in the base model looks at the whole batch: batch normalisation, limited experts, routers' losses."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from ..never_compiled import never_compiled
from ..routing.router import router_of
from ..warn_caller import warn_caller


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


def refuse_router_losses(model: nn.Module) -> None:
    """Makes the model, and models inside it, refuse a loss of mixed batches that their routers add to.

    Transformers computes the routers' auxiliary loss from the tokens of all samples in a batch.
    """
    for part in model.modules():
        if "output_router_logits" in inspect.signature(type(part).forward).parameters:
            part.register_forward_hook(_refuse_router_loss, with_kwargs=True)


@never_compiled
def _refuse_router_loss(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    route = router_of(part).active
    if route is None or not route.mixed or _coefficient(part) == 0:
        return
    if isinstance(output, tuple):  # return_dict=False: a loss is its first entry
        asked = kwargs.get("output_router_logits")
        if asked is None:
            asked = getattr(_text_config(part), "output_router_logits", False)
        adds = asked and output[0].dim() == 0
    else:
        found = [getattr(output, key, None) for key in ("aux_loss", "encoder_aux_loss", "decoder_aux_loss")]
        adds = getattr(output, "loss", None) is not None and any(loss is not None for loss in found)
    if adds:
        raise ValueError(
            "output_router_logits: the loss of this batch has the routers' auxiliary loss, which is computed "
            "from all its tokens, so one adapter's samples would change another's gradients; pass "
            "output_router_logits=False, or give each adapter a batch of its own"
        )


def _text_config(part: nn.Module) -> Any:
    config: Any = getattr(part, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _coefficient(part: nn.Module) -> Any:
    """Returns by what a model multiplies its routers' loss, None if unknown: most keep it when built."""
    for holder in (part, _text_config(part)):
        for key in ("router_aux_loss_coef", "aux_loss_coef"):
            if hasattr(holder, key):
                return getattr(holder, key)
    return None
