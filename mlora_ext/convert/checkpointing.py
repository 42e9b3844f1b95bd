"""Activation checkpointing: recomputation inside backward uses the route of its forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from ..routing.router import Router, router_of

_NAMES = ("activation_checkpointing", "gradient_checkpointing")


def install(model: nn.Module) -> None:
    """Makes Transformers' own checkpointing of a freshly converted model capture routes."""
    for name in _NAMES:
        if _calls_the_model_itself(type(model), name):
            model.__dict__[f"{name}_enable"] = EnableCheckpointing(model, name)


def _calls_the_model_itself(kind: type, name: str) -> bool:
    """Whether the class has the method, and not only as Transformers' alias of the other one."""
    definers = [_definer(kind, f"{other}_enable") for other in _NAMES]
    return _definer(kind, f"{name}_enable") is not None and (name == _NAMES[0] or definers[0] != definers[1])


def _definer(kind: type, method: str) -> type | None:
    return next((parent for parent in kind.__mro__ if method in parent.__dict__), None)


class EnableCheckpointing:
    """Replaces a model's `<name>_enable` method: calls the original with a `context_fn`.

    An object, not a method, so that it is copied and pickled with its model.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model = model
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Enables checkpointing by the model's own method; `use_reentrant` defaults to False.

        The first argument holds options of `torch.utils.checkpoint.checkpoint`. If checkpointing is not
        reentrant, `context_fn` defaults to `checkpoint_contexts(model)`.
        """
        keyword = f"{self.name}_kwargs"
        given: Mapping[str, Any] | None = args[0] if args else kwargs.pop(keyword, None)
        options = {"use_reentrant": False, **(given or {})}
        if not options["use_reentrant"]:
            options.setdefault("context_fn", checkpoint_contexts(self.model))
        own = getattr(type(self.model), f"{self.name}_enable")
        return own(self.model, *args[1:], **{keyword: options}, **kwargs)


class _Reenter(AbstractContextManager[None]):
    """Enters a captured route, once for every recomputation."""

    def __init__(self, router: Router) -> None:
        self._router, self._route = router, router.active
        self._contexts: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._contexts.append(self._router.entered(self._route))
        self._contexts[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._contexts.pop().__exit__(*error)


class CheckpointContexts:
    """The result of `checkpoint_contexts`: an object, so that it is copied and pickled with its model."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Captures the active route; returns the contexts of a forward pass and of its recomputation."""
        return nullcontext(), _Reenter(self._router)


def checkpoint_contexts(model: nn.Module) -> CheckpointContexts:
    """Returns a `context_fn` for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`.

    Recomputation runs inside backward, after the route's context has ended. The function captures the active
    route at each forward and enters it again for the recomputation, so several forward passes may be in
    flight. Transformers' own checkpointing of a converted model already uses it, unless it is reentrant.

    Args:
        model: converted by `convert_model`, or a part of such a model.

    Returns:
        The function to pass as `context_fn`.

    Example:
        >>> checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_contexts(model))
    """
    return CheckpointContexts(router_of(model))
