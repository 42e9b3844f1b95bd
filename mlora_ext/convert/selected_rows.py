"""Rows that a container selects for its parts: experts that are modules of their own, in Switch Transformers.

Values decide which rows a part gets, so it is known only where samples lie in the container's input. In a
mixed batch the container therefore runs twice. First it gets the number of each row in place of the row, and
parts that only note the numbers that they get. Then it runs itself, and the layers in each part use a route
of these rows.

Letters: N rows of the container's input, n rows of one call of a part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.adapter_layer import AdapterLayer
from ..never_compiled import never_compiled
from ..ops.segments import SegmentLayout
from ..out_of_memory import is_out_of_memory
from ..routing.route import Route
from ..routing.samples import Found, FoundPlaces, SampleDim
from ..routing.trial_passes import FAILURES, Observer

_CONTAINERS = (
    "transformers.models.switch_transformers.modeling_switch_transformers.SwitchTransformersExperts",
)
"""Classes of containers whose routers look at each sample alone.

NLLB's is none: the number of rows that an expert takes depends on the whole batch.
"""


def install(model: nn.Module) -> None:
    """Puts hooks on a freshly converted model's containers."""
    for name, module in model.named_modules():
        kind = type(module)
        if f"{kind.__module__}.{kind.__qualname__}" in _CONTAINERS:
            selects = SelectedRows(name)
            module.register_forward_pre_hook(selects.before, with_kwargs=True)
            module.register_forward_hook(selects.after, always_call=True)


class SelectedRows:
    """The hooks of one container.

    Args:
        name: of the container in the model.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @never_compiled
    def before(self, container: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tells the router which rows each part will get, if no other rule tells that of its layers."""
        layers = [part for part in container.modules() if isinstance(part, AdapterLayer) and part.specs]
        if not layers or not args or not isinstance(args[0], Tensor):
            return
        router, x = layers[0].router, args[0]
        router.selected.pop(self.name, None)
        if router.observer is not None:
            if isinstance(router.observer, Observer):
                router.observer.see(self.name, x, x)
            return
        route = router.route_of_reads(layers[0])
        if route is None or not _is_needed(route, layers):
            return
        try:
            place = route.place_in(self.name, x)
            numbers = _numbers_of_parts(container, x, args[1:], kwargs)
        except FAILURES as error:
            if is_out_of_memory(error):
                raise
            if route.mixed:
                return  # each layer refuses its own input
            raise ValueError(
                f"layer {self.name}: cannot tell which of its rows its parts get, on which dropout masks "
                f"depend ({type(error).__name__}: {error}); do not target layers in it, or leave "
                "lora_dropout out"
            ) from error
        owners = _Owners(route, x, place)
        routes = {part: [owners.route_of(rows) for rows in calls] for part, calls in numbers.items()}
        router.selected[self.name] = _NextRoute(self.name, routes)

    def after(self, container: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Ends what `before` began."""
        layer = next((part for part in container.modules() if isinstance(part, AdapterLayer)), None)
        if layer is not None:
            layer.router.selected.pop(self.name, None)


def _is_needed(route: Route, layers: Sequence[AdapterLayer]) -> bool:
    """Whether layers need to know which rows they get: for several adapters, or masks that follow samples."""
    if not route.samples:
        return False
    if not route.mixed:
        return any(layer.training and _drops(layer, route) for layer in layers)
    if not isinstance(route.places, FoundPlaces):
        return route.places is not None
    known = {layer for (layer, _), place in route.places.found.items() if isinstance(place, Found)}
    return not known.issuperset(layer.name for layer in layers)


def _drops(layer: AdapterLayer, route: Route) -> bool:
    """Whether an adapter of the route drops a part of a layer's input."""
    dropout = dict(zip(layer.group.adapters, layer.group.dropout, strict=True))
    return any(dropout.get(name, 0) > 0 for name in route.owners)


class _NextRoute:
    """Gives the route of a layer's next call.

    Args:
        container: its name.
        routes: of each part's calls, by the part's name.
    """

    def __init__(self, container: str, routes: Mapping[str, Sequence[Route]]) -> None:
        self._inside, self._routes = len(container) + 1, routes
        self._calls: Counter[str] = Counter()

    def __call__(self, layer: str) -> Route:
        """Returns it; raises ValueError if the layer's part has been called less often."""
        own = self._routes[layer[self._inside :].partition(".")[0]]
        self._calls[layer] += 1
        if self._calls[layer] > len(own):
            raise ValueError(
                f"layer {layer}: is called more often than the module around it, so it is unknown to which "
                "samples its rows belong; use one adapter for the whole batch, or do not target this layer"
            )
        return own[self._calls[layer] - 1]


class _Owners:
    """The adapter, sample and dropout row of each row of a container's input.

    Args:
        place: where samples lie in x; None: its flattened rows are in the route's order.
    """

    def __init__(self, route: Route, x: Tensor, place: SampleDim | None) -> None:
        self._route, rows = route, x.numel() // x.shape[-1]
        layout = route.layout_of(rows)
        table = torch.tensor([layout.adapters, range(len(layout.lengths)), layout.row0], device="cpu")
        lengths = torch.tensor(layout.lengths, device="cpu")
        begins = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        in_order = table.repeat_interleave(lengths, 1)
        in_order[2] += torch.arange(rows, device="cpu") - begins
        if place is None:
            self._table = in_order
        else:
            numbers = torch.arange(rows, device="cpu").view(*x.shape[:-1], 1)
            self._table = torch.empty_like(in_order)
            self._table[:, place.samples_first(numbers, route.batch).flatten()] = in_order

    def route_of(self, rows: Tensor) -> Route:
        """Returns the route of these rows, `[n]` int64: a segment for each run of rows of one sample."""
        adapters, samples, row0 = self._table[:, rows]
        begins = torch.ones_like(samples, dtype=torch.bool)
        begins[1:] = samples[1:] != samples[:-1]
        first = begins.nonzero().flatten()
        lengths = torch.diff(first, append=torch.tensor([len(rows)], device="cpu"))
        layout = SegmentLayout.from_lengths(*(t.tolist() for t in (lengths, adapters[first], row0[first])))
        used = sorted({adapter for adapter in layout.adapters if adapter >= 0})
        place, whole = {adapter: index for index, adapter in enumerate(used)}, self._route
        return Route(
            tuple(whole.names[i] for i in used),
            tuple(whole.seeds[i] for i in used),
            tuple(whole.steps[i] for i in used),
            layout.remap([place.get(i, -1) for i in range(len(whole.names))]),
            observer=whole.observer,
        )


def _numbers_of_parts(
    container: nn.Module, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, list[Tensor]]:
    """Returns `[n]` int64 for each call of each part: the numbers of the rows of x that it gets.

    Raises ValueError if a part gets something else than rows of x.
    """
    rows, seen = x.numel() // x.shape[-1], {name: list[Tensor]() for name in container._modules}
    number = torch.arange(rows, dtype=torch.float64, device=x.device)
    numbers = torch.stack([number, 2 * number + 1], -1).view(*x.shape[:-1], 2)
    parts, forward = container._modules, type(container).forward
    try:
        container.__dict__["_modules"] = {name: _Notes(calls) for name, calls in seen.items()}
        with torch.no_grad():
            forward(container, numbers, *args, **kwargs)
    finally:
        container.__dict__["_modules"] = parts
    return {name: [_checked(call, rows) for call in calls] for name, calls in seen.items()}


def _checked(numbers: Tensor, rows: int) -> Tensor:
    number, twice = numbers.reshape(-1, 2).cpu().unbind(-1)
    if not torch.equal(twice, 2 * number + 1) or not bool(((number >= 0) & (number < rows)).all()):
        raise ValueError("a part gets something else than rows of its container's input")
    return number.long()


class _Notes(nn.Module):
    """Takes a part's place and notes its inputs."""

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.seen.append(x)
        return x
