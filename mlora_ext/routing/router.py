"""The router of a converted model: tells layers which rows of a forward pass belong to which adapter.

A `Route` describes one forward pass. Entering it gives the operator's tensors, built once per batch, to every
group of layers (those with the same adapters, scalings and dropouts). A forward pass that is recomputed
inside backward, as by activation checkpointing, needs its own route again: see `checkpointing`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..backends.selection import chosen_backend
from ..frozen.weight import FrozenKind, FrozenWeight
from ..ops.functional import scaling_dtype
from ..ops.held import UpdateCounts
from ..ops.segments import SegmentLayout
from .adapter_info import AdapterInfo
from .in_flight import ForwardsInFlight, attach_token
from .route import (
    BASE,
    LayerGroup,
    LayerReads,
    Route,
    RoutedLayer,
    RouteTensors,
    Sees,
    SharedInput,
    only_used,
)
from .sample_table import LayerTable
from .samples import Found, SampleDim
from .thread_guard import ThreadGuard, calling_frame, inside_backward, inside_call, is_running
from .trial_passes import Observer


@dataclass(eq=False)
class _OpenCall:
    """A top-level forward in progress: its thread and frame, and what the router restores after it.

    `grads`: whether it began with gradients on.
    """

    before: tuple[Route | None, bool]
    thread: int
    frame: FrameType | None
    grads: bool

    def interrupted(self) -> bool:
        return self.thread == threading.get_ident() and self.frame is not None and not is_running(self.frame)


class Router:
    """Holds the active route of one converted model; all of the model's layers share it.

    Attributes:
        adapters: by name, in the order in which they were added.
        step: dropout step for training loops other than ours; each top-level training forward adds 1. No
            state dict holds it: a loop that resumes must save and restore it, or it counts from 0.
        default: the adapter of every row in a forward that names none; None: the model's only one.
        disabled: whether forwards that begin now leave all adapters out, whatever names they get.
        frozen_kind: makes the weights of layers that are converted later; None: plain.
        accumulates: whether backward may add to adapters' `grad` in place. Who sets it calls only
            `Tensor.backward`, without `inputs=`, and tells `moved` and `updates.record` what they ask for.
        held_gradients: what `hold_gradients` holds of the model; None: nothing.
        moves: counts calls of `moved`.
        updates: counts updates of adapters in place.
        fused_projections: groups of layers that share their input.
        observer: if set, layers show it their inputs and outputs, and leave adapters out.
        found: where samples lie in the layers' inputs, by kind of call, as trial passes have found.
        tables: what the table says of it, by class and mode of the module that is called.
        selected: by the name of a container whose call is in progress, gives the route of a layer inside by
            the layer's name; see `selected_rows`.
        specials: special tokens of the model's parts, cached because they take long to collect.
    """

    def __init__(self) -> None:
        self.adapters: dict[str, AdapterInfo] = {}
        self.groups: list[LayerGroup] = []
        self.step = 0
        self.default: str | None = None
        self.disabled = False
        self.frozen_kind: FrozenKind | None = None
        self.accumulates = False
        self.held_gradients: Any = None
        self.moves = 0
        self.updates = UpdateCounts()
        self.fused_projections: Sequence[SharedInput] = ()
        self.thread_guard = ThreadGuard()
        self.active: Route | None = None
        self.observer: Sees | None = None
        self.found: dict[Hashable, dict[tuple[str, int], Found | str]] = {}
        self.tables: dict[Hashable, LayerTable] = {}
        self.selected: dict[str, Callable[[str], Route]] = {}
        self.specials: dict[Hashable, Tensor] = {}
        self._unrouted_reads: dict[str, LayerReads | None] = {}
        self._entered_in_backward = False
        self._in_flight = ForwardsInFlight()
        self._calls: list[_OpenCall] = []

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "active": None,
            "observer": None,
            "held_gradients": None,
            "accumulates": self.accumulates and self.held_gradients is None,
            "selected": {},
            "_entered_in_backward": False,
            "_unrouted_reads": {},
            "_calls": [],
        }

    def packed(
        self, layout: SegmentLayout, names: Sequence[str] | None, steps: Sequence[int] | None
    ) -> Route:
        """Returns a route over packed rows; raises ValueError if names or counts do not fit the layout."""
        if not isinstance(layout, SegmentLayout):
            raise ValueError(f"layout: expected a SegmentLayout, got a {type(layout).__name__}")
        if isinstance(names, str):
            raise ValueError(f"names: expected a list of adapters, got {names!r}; write [{names!r}]")
        if isinstance(steps, int):
            raise ValueError(f"steps: expected a list with one step per name, got {steps}")
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
        """Returns a route with an adapter per sample, `__base__` = none; ValueError if a name is unknown."""
        used = set(adapter_names) - {BASE}
        self.check_names("adapter_names", sorted(used))
        if self.disabled:
            used, adapter_names = set(), [BASE] * len(adapter_names)
        names = tuple(name for name in self.adapters if name in used)
        samples = tuple(-1 if name == BASE else names.index(name) for name in adapter_names)
        return self._route(names, None, samples=samples, rows=rows)

    def _route(self, names: tuple[str, ...], steps: Sequence[int] | None, **rest: Any) -> Route:
        for name in names:
            self.adapters[name].check_started(name)
        infos = tuple(self.adapters[name] for name in names)
        seeds = tuple(info.seed for info in infos)
        if steps is None:
            return Route(names, seeds, (self.step,) * len(names), automatic=True, infos=infos, **rest)
        return Route(names, seeds, tuple(steps), infos=infos, **rest)

    def check_names(self, argument: str, names: Sequence[str]) -> None:
        """Raises ValueError, naming `argument` and the known adapters, for a name that the model lacks."""
        for name in names:
            if name not in self.adapters:
                known = ", ".join(self.adapters) or "none"
                raise ValueError(f"{argument}: no adapter {name!r} in this model; its adapters: {known}")

    @contextmanager
    def entered(self, route: Route | None) -> Iterator[None]:
        """Makes a route active inside the context; raises RuntimeError if another thread is inside one."""
        self.leave_interrupted()
        self.thread_guard.take()
        before = self.active, self._entered_in_backward
        try:
            self._set(route, inside_backward())
            yield
        finally:
            self.leave_interrupted()
            self._set(*before)
            self.thread_guard.give()

    def _set(self, route: Route | None, in_backward: bool) -> None:
        self.active = route
        self._entered_in_backward = in_backward
        self.selected.clear()  # an interrupt may have left some
        for fused_projections in self.fused_projections:
            fused_projections.forget()
        for group in self.groups:
            group.active = None
            if route is not None and route.rows is not None and group.device.type != "meta":
                group.active = route.tensors(group, route.rows)

    def regroup(self, groups: list[LayerGroup]) -> None:
        """Takes over new groups after adapters were added or removed."""
        self.groups = groups
        self.moved()
        self.forget_places()
        self._set(self.active, self._entered_in_backward)

    def moved(self) -> None:
        """Call it after an adapter's `grad`, `requires_grad` or hooks became other objects."""
        self.moves += 1

    def forget_places(self) -> None:
        """Forgets where samples lie, so that the next mixed batch is examined anew."""
        self.found, self.tables, self.specials = {}, {}, {}

    def group_on(self, group: LayerGroup, frozen: FrozenWeight) -> LayerGroup:
        """Returns the same group for layers whose weight has moved or changed dtype; makes it if needed."""
        place = (frozen.device, scaling_dtype(frozen.dtype))
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
        """As `observed_by`, with a new observer."""
        observer = Observer()
        with self.observed_by(observer):
            yield observer

    @contextmanager
    def observed_by(self, observer: Sees) -> Iterator[None]:
        """Makes layers show what they do to an observer, and add no adapter, inside the context."""
        self.thread_guard.take()
        self.observer = observer
        try:
            yield
        finally:
            self.observer = None
            self.thread_guard.give()

    def tensors_for(self, layer: RoutedLayer, x: Tensor) -> tuple[RouteTensors, SampleDim | None, int]:
        """Returns what a layer in eager mode calls the operator with.

        These are the operator's tensors, where samples lie in x (None: rows are in the route's order), and
        the number of samples. Raises ValueError if no route says which adapter the rows belong to, if it
        describes other rows, or if several forward passes are in flight and the recomputed one is unknown.
        Raises RuntimeError if another thread is inside a route, or if backward recomputes a layer that would
        compute otherwise than in its forward pass.
        """
        rows, in_backward = x.numel() // x.shape[-1], inside_backward()
        recomputing = in_backward and not self._entered_in_backward
        self.thread_guard.check(self._entered_in_backward and not in_backward)
        if self.active is not None and torch.is_grad_enabled():
            self.active.trained = True
        if recomputing:
            route = self._recomputed(layer, x.shape[0] if x.dim() > 2 else 1)
        else:
            route = self.active or self._unrouted(layer, x.shape[0] if x.dim() > 2 else 1)
        self._compare_reads(layer, route, in_backward)
        if route.samples and not set(route.names) & set(layer.group.adapters):
            return route.tensors(layer.group, rows), None, route.batch
        selected = self._selected_for(layer)
        if selected is not None:
            selected.place_in(layer.name, x)
            return selected.tensors(layer.group, rows), None, route.batch
        try:
            place = route.place_in(layer.name, x)
        except ValueError:
            self.forget_places()
            raise
        active = None if recomputing else layer.group.active
        if active is None or active.rows != rows:
            active = route.tensors(layer.group, rows)
        return active, place, route.batch

    def _compare_reads(self, layer: RoutedLayer, route: Route, in_backward: bool) -> None:
        """Notes what a layer reads beside the route; when backward recomputes it, compares with the note."""
        in_graph = torch.is_grad_enabled() or (self._calls and self._calls[-1].grads)
        if not (in_backward or in_graph):
            return  # reentrant checkpoints turn gradients off inside of a call that has them
        backend, updates = chosen_backend(), self.updates.count
        now = LayerReads(route.names, layer.training, layer.group, backend, updates)
        before = route.read.setdefault(layer.name, now)
        if in_backward and now != before:
            change = "it was called in several ways" if before is None else self._change(route, before, now)
            if change:
                raise RuntimeError(
                    f"layer {layer.name}: backward recomputes this checkpointed layer, but since its forward "
                    f"pass {change}; run backward before you change that"
                )
            assert before is not None
            self.updates.refuse(route.names, before.updates)
        elif not in_backward and now != before:
            unlike = before is None or self._change(route, before, now)
            route.read[layer.name] = None if unlike and route.read is not self._unrouted_reads else now

    def _change(self, route: Route, before: LayerReads, now: LayerReads) -> str:
        """Returns what has changed in what a layer reads, as far as its results depend on it."""
        if before.names != now.names:
            return "other adapters have been set, or adapters disabled or enabled"
        if before.backend != now.backend:
            return f"use_backend has changed from {before.backend or 'none'} to {now.backend or 'none'}"
        drops = False
        for name, info in zip(route.names, route.infos, strict=True):
            if before.group.settings(name) != now.group.settings(name) or self.adapters.get(name) is not info:
                return f"adapter {name!r} has been removed or replaced"
            drops |= now.group.settings(name)[1] > 0
        if drops and before.training != now.training:
            return f"the model was put into {'training' if now.training else 'evaluation'} mode"
        return ""

    def _selected_for(self, layer: RoutedLayer) -> Route | None:
        """Returns the route of the rows that a container has selected for a layer's part in this call."""
        for container, route_of in self.selected.items():
            if layer.name.startswith(f"{container}."):
                return route_of(layer.name)
        return None

    def route_of_reads(self, layer: RoutedLayer) -> Route | None:
        """Returns the route along which a layer's weight is read; None outside of forward passes.

        In a part of the model that is called by itself it is that of the part's layers. Raises ValueError if
        several adapters may be meant.
        """
        if inside_backward() and not self._entered_in_backward:
            return self._recomputed(layer, 1)
        if self.active is None and inside_call():
            return self._only_adapter(1)
        return self.active

    def _only_adapter(self, samples: int) -> Route:
        """Returns a route that gives all samples the default or only adapter; none if all are off."""
        names = () if self.disabled else (self.default,) if self.default else tuple(self.adapters)
        if len(names) > 1:
            raise ValueError(
                f"this model has {len(names)} adapters ({', '.join(names)}) and no active "
                "route: pass adapter_names=[...] (one per sample) to the forward call, or call it inside "
                "mlora_ext.route(...)"
            )
        return self._route(names, None, samples=(0 if names else -1,) * samples)

    def _unrouted(self, layer: RoutedLayer, samples: int) -> Route:
        """Returns the only adapter's route, for a layer called outside the model's forward and any route."""
        route = self._only_adapter(samples)
        route.read = self._unrouted_reads
        if layer.training and any(layer.group.dropout) and torch.is_grad_enabled():
            raise ValueError(
                f"layer {layer.name}: outside of the model's own forward and of any route, lora_dropout "
                "draws the same masks in every step; call the converted model itself, or this part of it "
                "inside mlora_ext.route(...)"
            )
        return route

    def _recomputed(self, layer: RoutedLayer, samples: int) -> Route:
        """Returns the route of the pass that backward recomputes; all passes in flight must be alike."""
        in_flight = self._in_flight.alive()
        routes = [flight.route for flight in in_flight]
        if self.active is not None and not self.active.recorded:
            routes.append(self.active)
        unknown = not routes and (self._in_flight.recorded or len(self.adapters) > 1)
        if unknown or len({self._identity(route) for route in routes}) > 1:
            raise ValueError(
                f"{len(routes)} forward passes are in flight, and a checkpointed layer cannot tell which one "
                "backward recomputes; call the converted model itself, run each backward before the next "
                "forward, or checkpoint with use_reentrant=False and "
                "context_fn=mlora_ext.checkpoint_contexts(model)"
            )
        if len(in_flight) == 1 and not torch._C._autograd._get_current_graph_task_keep_graph():
            in_flight[0].used = True
        return routes[0] if routes else self._unrouted(layer, samples)

    def _identity(self, route: Route) -> Hashable:
        """Returns a key that is equal for routes along which a recomputation gives the same bits."""
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
        seen_by = route.places, id(route.observer)
        return route.names, masks, route.layout, route.samples, route.rows, route.batch, *seen_by

    @property
    def is_called(self) -> bool:
        """Whether a top-level forward is in progress."""
        return bool(self._calls)

    def begin_call(self, route: Route | None, samples: int, rows: int | None) -> None:
        """Begins a top-level forward: enters its route, or the only adapter's if none is active."""
        self.thread_guard.take()
        before = self.active, self._entered_in_backward
        self._calls.append(_OpenCall(before, threading.get_ident(), calling_frame(), torch.is_grad_enabled()))
        knows_all_rows = self.disabled or self.default is not None or len(self.adapters) <= 1
        if route is None and self.active is None and knows_all_rows:
            route = self._only_adapter(samples)
        if route is None and self.active is not None and self.active.layout is None:
            route = self.active
        if self.active is not None:
            self.active.called = True
        if route is not None:
            route.rows = rows
            self._set(route, inside_backward())

    def end_call(self, output: object, training: bool) -> None:
        """Ends a top-level forward: leaves its route; advances the step unless it failed (`output` None)."""
        call = self._calls[-1] if self._calls else None
        if call is None or call.thread != threading.get_ident() or call.frame is not calling_frame():
            return  # the call was refused before it began
        route = self.active
        before, in_backward = self._calls.pop().before
        if output is not None and training and torch.is_grad_enabled() and not inside_backward():
            self.step += 1
            token = attach_token(output)
            if route is not None and token is not None:
                self._in_flight.record(route, token)
            if before is not None and before.automatic:
                before = before.advanced(self.step)
        self._set(before, in_backward)
        self.thread_guard.give()

    def leave_interrupted(self) -> None:
        """Leaves calls that ended without `end_call`: torch runs no hook after a `KeyboardInterrupt`."""
        while self._calls and self._calls[-1].interrupted():
            self._set(*self._calls.pop().before)
            self.thread_guard.give()


def router_of(model: nn.Module) -> Router:
    """Returns the router of a converted model or a part of one; raises ValueError if there is none."""
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
    """Runs a converted model on packed rows: each segment's rows belong to one adapter.

    Forward captures the route; backward needs no context. Only one thread at a time may be inside.

    Args:
        model: converted by `convert_model`, or a part of such a model.
        layout: rows of each segment; its adapters are indices into `names`.
        names: adapters; each gets a gradient, zero if it has no rows. Default: all of the model's, in the
            order in which they were added; then only those with rows get a gradient.
        steps: dropout step of each of these adapters. Default: the counter `model.mlora_router.step`. Every
            training forward of the model advances it, and so does a context in which only parts of the model
            are called.

    Raises:
        ValueError: if a name is unknown or given twice, or the counts disagree.
        RuntimeError: if another thread is inside a route or the model's forward.

    Example:
        >>> with route(model, SegmentLayout.from_lengths([7, 5]), names=["a", "b"]):
        ...     out = model(input_ids=packed)
    """
    router = router_of(model)
    entered = router.packed(layout, names, steps)
    with router.entered(entered):
        yield
        # Layers inside a reentrant checkpoint see gradients off, so `entered.trained` does not tell.
        trained = entered.trained or (torch.is_grad_enabled() and not entered.called)
        if trained and model.training and not inside_backward() and not entered.recorded:
            router._in_flight.record(entered, None)
            if entered.automatic and not entered.called:
                router.step += 1
