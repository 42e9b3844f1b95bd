"""The router of a converted model: how layers learn which rows of a forward pass belong to which adapter.

A `Route` describes one forward pass. Entering it gives every group of layers (those with the same adapters,
scalings and dropouts) the operator's tensors, built once per batch. A forward pass that is recomputed inside
backward, as activation checkpointing does, needs its own route again: see `checkpointing`.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.functional import scaling_dtype
from ...ops.segments import SegmentLayout
from .in_flight import ForwardsInFlight, attach_token
from .route import BASE, LayerGroup, Route, RoutedLayer, RouteTensors, SharedInput, only_used
from .samples import Places, SampleDim
from .thread_guard import ThreadGuard, calling_frame, is_running
from .trial_passes import Observer


@dataclass(eq=False)
class AdapterInfo:
    """What the router knows of an adapter: PEFT's config as given, and the seed of its dropout."""

    config: Any
    seed: int


@dataclass(eq=False)
class _Call:
    """A top-level forward under way: what it found active, and the thread and the frame that run it."""

    before: tuple[Route | None, bool]
    thread: int
    frame: FrameType | None

    def interrupted(self) -> bool:
        return self.thread == threading.get_ident() and self.frame is not None and not is_running(self.frame)


class Router:
    """The active route of one converted model; shared by its layers.

    Attributes:
        adapters: the model's adapters by name, in the order in which they joined.
        groups: distinct sets of adapters among the layers.
        step: dropout step of foreign training loops; the top-level training forward advances it. No state
            dict holds it: a loop that stops and resumes stores it and sets it again, else it counts from 0.
        default: the adapter of every row of a forward that names none; None: the model's only one.
        disabled: whether forwards that begin now leave all adapters out, whatever names they are given.
        accumulates: whether backward may add to the `grad` of adapters itself, in place and past hooks on
            them; for loops that use `Tensor.backward` only.
        fused_projections: sets of layers that are given the same x.
        thread_guard: the thread that is inside of a route or of a forward pass.
        observer: what layers show their input to, in place of computing with adapters.
        places: where samples lie in the layers' inputs, by kind of forward pass.
        specials: special tokens of the model's parts, which take long to collect.
    """

    def __init__(self) -> None:
        self.adapters: dict[str, AdapterInfo] = {}
        self.groups: list[LayerGroup] = []
        self.step = 0
        self.default: str | None = None
        self.disabled = False
        self.packs_base = False
        self.accumulates = False
        self.fused_projections: Sequence[SharedInput] = ()
        self.thread_guard = ThreadGuard()
        self.active: Route | None = None
        self.observer: Observer | None = None
        self.places: dict[Hashable, Places] = {}
        self.specials: dict[Hashable, Tensor] = {}
        self._entered_in_backward = False
        self._in_flight = ForwardsInFlight()
        self._calls: list[_Call] = []

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "active": None,
            "observer": None,
            "_entered_in_backward": False,
            "_calls": [],
        }

    def packed(
        self, layout: SegmentLayout, names: Sequence[str] | None, steps: Sequence[int] | None
    ) -> Route:
        """A route over packed rows.

        Raises:
            ValueError: if a name is unknown or twice, or the layout counts more adapters than there are
                names.
        """
        if isinstance(names, str):
            raise ValueError(f"names: expected a list of adapters, got {names!r}; write [{names!r}]")
        if isinstance(steps, int):
            raise ValueError(f"steps: expected a list of one per name, got {steps}")
        default, names = names is None, tuple(self.adapters if names is None else names)
        self.check_names("names", names)
        if len(set(names)) != len(names):
            raise ValueError(f"names: expected each adapter once, got {list(names)}")
        if layout.num_adapters > len(names):
            raise ValueError(
                f"layout: expected adapters below {len(names)} (the number of names), got "
                f"{layout.num_adapters - 1}"
            )
        if steps is not None and len(steps) != len(names):
            raise ValueError(f"steps: expected one per name ({len(names)}), got {len(steps)}")
        if self.disabled:
            layout = layout.remap([-1] * len(names))
        if default or self.disabled:
            names, steps, layout = only_used(names, steps, layout)
        return self._route(names, steps, layout=layout, rows=layout.total_rows)

    def sampled(self, adapter_names: Sequence[str], rows: int | None = None) -> Route:
        """A route in which each sample of the batch has its adapter; `__base__` = none.

        Raises:
            ValueError: if a name is unknown.
        """
        used = set(adapter_names) - {BASE}
        self.check_names("adapter_names", sorted(used))
        if self.disabled:
            used, adapter_names = set(), [BASE] * len(adapter_names)
        names = tuple(name for name in self.adapters if name in used)
        samples = tuple(-1 if name == BASE else names.index(name) for name in adapter_names)
        return self._route(names, None, samples=samples, rows=rows)

    def _route(self, names: tuple[str, ...], steps: Sequence[int] | None, **rest: Any) -> Route:
        seeds = tuple(self.adapters[name].seed for name in names)
        if steps is None:
            return Route(names, seeds, (self.step,) * len(names), automatic=True, **rest)
        return Route(names, seeds, tuple(steps), **rest)

    def check_names(self, argument: str, names: Sequence[str]) -> None:
        """Refuse names that the model does not have.

        Raises:
            ValueError: naming the argument, the name, and the adapters that exist.
        """
        for name in names:
            if name not in self.adapters:
                known = ", ".join(self.adapters) or "none"
                raise ValueError(f"{argument}: no adapter {name!r} in this model; its adapters: {known}")

    @contextmanager
    def entered(self, route: Route | None) -> Iterator[None]:
        """Make a route the active one inside the context.

        Raises:
            RuntimeError: if another thread is inside of one.
        """
        self.leave_interrupted()
        self.thread_guard.take()
        before = self.active, self._entered_in_backward
        try:
            self._set(route, _in_backward())
            yield
        finally:
            self.leave_interrupted()
            self._set(*before)
            self.thread_guard.give()

    def _set(self, route: Route | None, in_backward: bool) -> None:
        self.active = route
        self._entered_in_backward = in_backward
        for fused_projections in self.fused_projections:
            fused_projections.forget()
        for group in self.groups:
            group.active = None
            if route is not None and route.rows is not None and group.device.type != "meta":
                group.active = route.tensors(group, route.rows)

    def regroup(self, groups: list[LayerGroup]) -> None:
        """Take over new groups after adapters have joined or left."""
        self.groups = groups
        self.forget_places()
        self._set(self.active, self._entered_in_backward)

    def forget_places(self) -> None:
        """Have the next mixed batch looked at anew."""
        self.places, self.specials = {}, {}

    def group_on(self, group: LayerGroup, weight: Tensor) -> LayerGroup:
        """The same group for layers whose weight has moved or changed its dtype; made if there is none."""
        place = (weight.device, scaling_dtype(weight.dtype))
        if (group.device, group.dtype) == place:
            return group
        facts = (group.adapters, group.scaling, group.dropout, *place)
        for other in self.groups:
            if (other.adapters, other.scaling, other.dropout, other.device, other.dtype) == facts:
                return other
        self.groups.append(LayerGroup(*facts))
        return self.groups[-1]

    @contextmanager
    def observed(self) -> Iterator[Observer]:
        """Inside the context layers show their inputs to the observer and add no adapter."""
        self.thread_guard.take()
        self.observer = Observer()
        try:
            yield self.observer
        finally:
            self.observer = None
            self.thread_guard.give()

    def tensors_for(self, layer: RoutedLayer, x: Tensor) -> tuple[RouteTensors, SampleDim | None, int]:
        """What a layer in eager mode calls the operator with.

        Returns:
            The operator's tensors, where samples lie in x unless its rows are in the route's order, and the
            number of samples.

        Raises:
            ValueError: if no route says which adapter the rows belong to, it describes other rows, or several
                forward passes are in flight and the one that is being recomputed is unknown.
            RuntimeError: if another thread is inside of a route.
        """
        rows, in_backward = x.numel() // x.shape[-1], _in_backward()
        recomputing = in_backward and not self._entered_in_backward
        self.thread_guard.check(self._entered_in_backward and not in_backward)
        if self.active is not None and torch.is_grad_enabled():
            self.active.trained = True
        if recomputing:
            route = self._recomputed(layer, x.shape[0] if x.dim() > 2 else 1)
        else:
            route = self.active or self._unrouted(layer, x.shape[0] if x.dim() > 2 else 1)
        if route.samples and not set(route.names) & set(layer.group.adapters):
            return route.tensors(layer.group, rows), None, route.batch
        try:
            place = route.place_in(layer.name, x)
        except ValueError:
            self.forget_places()
            raise
        active = None if recomputing else layer.group.active
        if active is None or active.rows != rows:
            active = route.tensors(layer.group, rows)
        return active, place, route.batch

    def _only_adapter(self, samples: int) -> Route:
        """All samples belong to the default or only adapter, or to none if there is none or all are off."""
        names = () if self.disabled else (self.default,) if self.default else tuple(self.adapters)
        if len(names) > 1:
            raise ValueError(
                f"this model has {len(names)} adapters ({', '.join(names)}) and no active "
                "route: pass adapter_names=[...] (one per sample) to the forward call, or call it inside "
                "mlora_ext.route(...)"
            )
        return self._route(names, None, samples=(0 if names else -1,) * samples)

    def _knows_all_rows(self) -> bool:
        return self.disabled or self.default is not None or len(self.adapters) <= 1

    def _unrouted(self, layer: RoutedLayer, samples: int) -> Route:
        """The only adapter's route, for a layer called outside of the model's forward and of any route."""
        route = self._only_adapter(samples)
        if layer.training and any(layer.group.dropout) and torch.is_grad_enabled():
            raise ValueError(
                f"layer {layer.name}: a part of the model trains with lora_dropout outside of the model's "
                "own forward and of any route, so every step would draw the same masks: call the converted "
                "model itself, or this part of it inside mlora_ext.route(...)"
            )
        return route

    def _recomputed(self, layer: RoutedLayer, samples: int) -> Route:
        """The route of the forward pass that backward is recomputing: all that are in flight are alike."""
        in_flight = self._in_flight.alive()
        routes = [flight.route for flight in in_flight]
        if self.active is not None and not self.active.recorded:
            routes.append(self.active)
        unknown = not routes and (self._in_flight.recorded or len(self.adapters) > 1)
        if unknown or len({self._identity(route) for route in routes}) > 1:
            raise ValueError(
                f"{len(routes)} forward passes are in flight, and a checkpointed layer cannot tell which is "
                "being recomputed: call the converted model itself, run each backward before the next "
                "forward, or checkpoint with use_reentrant=False and "
                "context_fn=mlora_ext.nn.checkpoint_contexts(model)"
            )
        if len(in_flight) == 1 and not torch._C._autograd._get_current_graph_task_keep_graph():
            in_flight[0].used = True
        return routes[0] if routes else self._unrouted(layer, samples)

    def _identity(self, route: Route) -> Hashable:
        """Equal for routes along which a recomputation gives the same bits."""
        drops = {
            name
            for group in self.groups
            for name, p in zip(group.adapters, group.dropout, strict=True)
            if p > 0
        }
        masks = tuple(
            (seed, step) if name in drops else None
            for name, seed, step in zip(route.names, route.seeds, route.steps, strict=True)
        )
        return route.names, masks, route.layout, route.samples, route.rows, route.batch, id(route.places)

    @property
    def is_called(self) -> bool:
        """Whether a top-level forward is under way."""
        return bool(self._calls)

    def begin_call(self, route: Route | None, samples: int, rows: int | None) -> None:
        """A top-level forward begins: enter its route, or the only adapter's if none is active."""
        self.thread_guard.take()
        before = self.active, self._entered_in_backward
        self._calls.append(_Call(before, threading.get_ident(), calling_frame()))
        if route is None and self.active is None and self._knows_all_rows():
            route = self._only_adapter(samples)
        if route is None and self.active is not None and self.active.layout is None:
            route = self.active
        if self.active is not None:
            self.active.called = True
        if route is not None:
            route.rows = rows
            self._set(route, _in_backward())

    def end_call(self, output: object, training: bool) -> None:
        """A top-level forward has ended, or failed (`output` None): leave its route, advance the step."""
        call = self._calls[-1] if self._calls else None
        if call is None or call.thread != threading.get_ident() or call.frame is not calling_frame():
            return  # the call was refused before it began
        route = self.active
        before, in_backward = self._calls.pop().before
        if output is not None and training and torch.is_grad_enabled() and not _in_backward():
            self.step += 1
            token = attach_token(output)
            if route is not None and token is not None:
                self._in_flight.record(route, token)
            if before is not None and before.automatic:
                before = before.advanced(self.step)
        self._set(before, in_backward)
        self.thread_guard.give()

    def leave_interrupted(self) -> None:
        """Leave calls that have ended without `end_call`: torch runs no hook after a `KeyboardInterrupt`."""
        while self._calls and self._calls[-1].interrupted():
            self._set(*self._calls.pop().before)
            self.thread_guard.give()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def router_of(model: nn.Module) -> Router:
    """The router of a converted model, or of a part of one.

    Raises:
        ValueError: if the model has not been converted.
    """
    own = model.__dict__.get("mlora_router")
    if isinstance(own, Router):
        return own
    for module in model.modules():
        found: object = getattr(module, "router", None)
        if isinstance(found, Router):
            return found
    raise ValueError(f"model: expected one converted by mlora_ext.convert_model, got {type(model).__name__}")


@contextmanager
def route(
    model: nn.Module,
    layout: SegmentLayout,
    names: Sequence[str] | None = None,
    *,
    steps: Sequence[int] | None = None,
) -> Iterator[None]:
    """Run a converted model on packed rows: each segment's rows belong to one adapter.

    The route is captured at forward; backward needs no context. One thread at a time.

    Args:
        model: converted by `convert_model`, or a part of such a model.
        layout: rows of each segment; its adapters count `names`.
        names: adapters; every one gets a gradient, zero if it has no rows. Default: the layout counts all of
            the model's, in the order in which they joined, and those with rows get a gradient.
        steps: dropout step of each of these adapters. Default: the counter `model.mlora_router.step`, which
            every training forward of the model advances, and a context in which only parts of it are called.

    Raises:
        ValueError: if a name is unknown or given twice, or the counts disagree.
        RuntimeError: if another thread is inside of a route or of the model's forward.

    Example:
        >>> with route(model, SegmentLayout.from_lengths([7, 5]), names=["a", "b"]):
        ...     out = model(input_ids=packed)
    """
    router = router_of(model)
    entered = router.packed(layout, names, steps)
    with router.entered(entered):
        yield
        # Layers inside a reentrant checkpoint see no gradients: only the model knows whether they are off.
        trained = entered.trained or (torch.is_grad_enabled() and not entered.called)
        if trained and model.training and not _in_backward() and not entered.recorded:
            router._in_flight.record(entered, None)
            if entered.automatic and not entered.called:
                router.step += 1
