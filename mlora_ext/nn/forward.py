"""`adapter_names=` on a converted model's forward and generate.

Hooks and `generate` sit on the instance; a deep copy or a pickled model has its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .control import refuse_bypassed_head
from .routing import router_of

_BATCH_ARGUMENTS = ("input_ids", "inputs_embeds", "inputs", "input_features", "pixel_values")


def install(model: nn.Module) -> None:
    """Teach a freshly converted model the argument `adapter_names`."""
    model.register_forward_pre_hook(_before_forward, with_kwargs=True)
    model.register_forward_hook(_after_forward, always_call=True)
    if callable(getattr(model, "generate", None)):
        model.__dict__["generate"] = Generate(model)


def uninstall(model: nn.Module) -> None:
    """Take all that off a copy that is to be a plain model."""
    for handlers, ours in (
        (model._forward_pre_hooks, _before_forward),
        (model._forward_hooks, _after_forward),
    ):
        for key in [key for key, hook in handlers.items() if hook is ours]:
            del handlers[key]
    model.__dict__.pop("generate", None)


class Generate:
    """A converted model's `generate`: the model's own, with one adapter per prompt.

    An object and not a method, so that it is copied and pickled with its model.

    Args:
        model: with a `generate` of its own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, adapter_names: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Generate.

        Args:
            args: as the model's own `generate`.
            adapter_names: one per prompt, `__base__` = none; beams and several return sequences follow their
                prompt.
            kwargs: as the model's own `generate`.

        Returns:
            What the model's own `generate` returns.

        Raises:
            ValueError: if a name is unknown, or there is not one name per prompt.
        """
        kind: Any = type(self.model)
        own = kind.generate
        if adapter_names is None:
            return own(self.model, *args, **kwargs)
        shape = _batch_shape(args, kwargs)
        if shape is not None:
            _check_count(adapter_names, shape[0])
        router = router_of(self.model)
        with router.entered(router.sampled(adapter_names)):
            return own(self.model, *args, **kwargs)


@torch.compiler.disable
def _before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    router = router_of(model)
    router.leave_interrupted()
    router.turn.check()
    refuse_bypassed_head(model, kwargs)
    names = kwargs.pop("adapter_names", None)
    shape = _batch_shape(args, kwargs)
    route = None
    if names is not None:
        if router.active is not None:
            raise ValueError(
                "adapter_names: a route is active already; give the adapters in one of the two ways"
            )
        if shape is None:
            raise ValueError(
                "adapter_names: expected a batch (input_ids or inputs_embeds) beside them, got none"
            )
        _check_count(names, shape[0])
        route = router.sampled(names)
    samples, each = shape or (1, None)
    router.begin_call(route, samples, None if each is None else samples * each)
    return args, kwargs


@torch.compiler.disable
def _after_forward(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    router_of(model).end_call(output, model.training)


def _check_count(names: Sequence[str], batch: int) -> None:
    if isinstance(names, str) or len(names) != batch:
        raise ValueError(f"adapter_names: expected one name per sample ({batch}), got {names!r}")


def _batch_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """Samples and rows per sample of the first tensor that is a batch."""
    candidates = [kwargs.get(name) for name in _BATCH_ARGUMENTS] + list(args[:1])
    for value in candidates:
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape[0], _rows_per_sample(value)
    return None


def _rows_per_sample(value: Tensor) -> int:
    if value.dim() == 1:
        return 1
    integers = value.dtype in (torch.int64, torch.int32)
    return math.prod(value.shape[1:] if integers else value.shape[1:-1])
