"""Activation checkpointing: a recomputation inside backward runs along the route of its forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from .routing.router import Router, router_of

_NAMES = ("activation_checkpointing", "gradient_checkpointing")


def install(model: nn.Module) -> None:
    """Let Transformers' own checkpointing of a freshly converted model capture its routes."""
    for name in _NAMES:
        if _calls_the_model_itself(type(model), name):
            model.__dict__[f"{name}_enable"] = EnableCheckpointing(model, name)


def uninstall(model: nn.Module) -> None:
    """Take all that off a copy that is to be a plain model."""
    for name in _NAMES:
        model.__dict__.pop(f"{name}_enable", None)


def _calls_the_model_itself(kind: type, name: str) -> bool:
    """Whether the method exists and is not Transformers' alias of the other one."""
    definers = [_definer(kind, f"{other}_enable") for other in _NAMES]
    return _definer(kind, f"{name}_enable") is not None and (name == _NAMES[0] or definers[0] != definers[1])


def _definer(kind: type, method: str) -> type | None:
    return next((parent for parent in kind.__mro__ if method in parent.__dict__), None)


class EnableCheckpointing:
    """A converted model's `activation_checkpointing_enable`: the model's own, with `context_fn`.

    An object and not a method, so that it is copied and pickled with its model.

    Args:
        model: with such a method of its own.
        name: of the method, without `_enable`.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model = model
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Enable checkpointing.

        Args:
            args: as the model's own method; first the options of `torch.utils.checkpoint.checkpoint`. Default
                of `use_reentrant`: False; then `context_fn` is `checkpoint_contexts(model)` unless given.
            kwargs: as the model's own method.

        Returns:
            What the model's own method returns.
        """
        keyword = f"{self.name}_kwargs"
        given: Mapping[str, Any] | None = args[0] if args else kwargs.pop(keyword, None)
        options = {"use_reentrant": False, **(given or {})}
        if not options["use_reentrant"]:
            options.setdefault("context_fn", checkpoint_contexts(self.model))
        own = getattr(type(self.model), f"{self.name}_enable")
        return own(self.model, *args[1:], **{keyword: options}, **kwargs)


class _Reenter(AbstractContextManager[None]):
    """Enters a captured route, as often as recomputation asks."""

    def __init__(self, router: Router) -> None:
        self._router, self._route = router, router.active
        self._contexts: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._contexts.append(self._router.entered(self._route))
        self._contexts[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._contexts.pop().__exit__(*error)


class CheckpointContexts:
    """What `checkpoint_contexts` returns: an object, so that it is copied and pickled with its model."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Contexts of a forward pass, whose route is captured now, and of its recomputation."""
        return nullcontext(), _Reenter(self._router)


def checkpoint_contexts(model: nn.Module) -> CheckpointContexts:
    """`context_fn` for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`.

    Recomputation runs inside backward, outside the route's context. This captures the active route at each
    forward and enters it again for its recomputation, so several forward passes may be in flight.
    Transformers' checkpointing of a converted model uses it by itself, unless it is reentrant.

    Args:
        model: converted by `convert_model`, or a part of such a model.

    Returns:
        The function to pass as `context_fn`.

    Example:
        >>> checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_contexts(model))
    """
    return CheckpointContexts(router_of(model))
