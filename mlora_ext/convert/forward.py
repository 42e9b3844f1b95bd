"""Adds `adapter_names=` to a converted model's forward and generate.

Hooks and `generate` sit on the instance, so that a deep copy or a pickled model has its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..layers.adapter_weights import refuse_bypassed_head
from ..layers.batch_statistics import refuse_router_losses
from ..never_compiled import never_compiled
from ..routing.route import Route
from ..routing.router import router_of
from . import locate, selected_rows
from .locate import contents_of, rows_per_sample


def install(model: nn.Module) -> None:
    """Adds the argument `adapter_names` to a freshly converted model."""
    model.register_forward_pre_hook(_before_forward, with_kwargs=True)
    refuse_router_losses(model)  # before the hook that leaves the route
    model.register_forward_hook(_after_forward, always_call=True)
    for part in model.children():
        if any(True for _ in part.children()):  # skips layers, which may become targets
            part.register_forward_pre_hook(_refuse_names, with_kwargs=True)
    locate.install(model)
    selected_rows.install(model)
    if callable(getattr(model, "generate", None)):
        model.__dict__["generate"] = Generate(model)


class Generate:
    """Replaces a model's `generate`: calls the original with one adapter per prompt.

    An object, not a method, so that it is copied and pickled with its model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, adapter_names: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Generates; `adapter_names` has one name per prompt, `__base__` for none.

        Beams and several return sequences use their prompt's adapter. Raises ValueError if a name is unknown,
        or if there is not one name per prompt.
        """
        kind: Any = type(self.model)
        own = kind.generate
        if adapter_names is None:
            return own(self.model, *args, **kwargs)
        batch = next(iter(contents_of(args, kwargs).values()), None)
        if batch is not None:
            _check_count(adapter_names, batch.shape[0])
        router = router_of(self.model)
        route = router.sampled(adapter_names)
        with router.entered(route), _counting_copies(self.model, route):
            return own(self.model, *args, **kwargs)


@contextmanager
def _counting_copies(model: nn.Module, route: Route) -> Iterator[None]:
    """Tells a route how many adjacent copies of each prompt the model's `generate` makes."""
    expand = getattr(model, "_expand_inputs_for_generation", None)

    def counted(expand_size: int = 1, *args: Any, **kwargs: Any) -> Any:
        route.copies = expand_size
        return expand(expand_size, *args, **kwargs)  # type: ignore[misc]

    if expand is None:
        yield
        return
    model.__dict__["_expand_inputs_for_generation"] = counted
    try:
        yield
    finally:
        del model.__dict__["_expand_inputs_for_generation"]


@never_compiled
def _before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    router = router_of(model)
    router.leave_interrupted()
    router.thread_guard.check()
    refuse_bypassed_head(model, kwargs)
    names = kwargs.pop("adapter_names", None)
    contents = contents_of(args, kwargs)
    batch = next(iter(contents.values()), None)
    route = None
    if names is not None:
        if router.active is not None:
            raise ValueError(
                "adapter_names: a route is already active; use adapter_names or mlora_ext.route, not both"
            )
        if batch is None:
            raise ValueError("adapter_names: the call has no batch; pass one, such as input_ids=")
        _check_count(names, batch.shape[0])
        route = router.sampled(names)
    target = route or router.active
    if target is not None and batch is not None:
        locate.locate(router, target, model, (args, kwargs), contents)
    samples, each = (1, None) if batch is None else (batch.shape[0], rows_per_sample(batch))
    router.begin_call(route, samples, None if each is None else samples * each)
    return args, kwargs


def _refuse_names(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises ValueError for names that bypassed the model's own hooks, where nothing would read them."""
    if "adapter_names" in kwargs:
        raise ValueError(
            "adapter_names: only the converted model itself takes them; call model(...), not "
            "model.forward(...) or a part of the model"
        )


@never_compiled
def _after_forward(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    router_of(model).end_call(output, model.training)


def _check_count(names: Sequence[str], batch: int) -> None:
    listed = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    if not listed or len(names) != batch:
        raise ValueError(
            f"adapter_names: expected one name per sample ({batch}), '__base__' for none, got {names!r}"
        )
