"""A route: which rows of a forward pass belong to which adapter, as tensors for each layer group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from ..ops.dropout import refuse_capture, rng_table
from ..ops.segments import SegmentLayout
from ..upload import to_device
from .adapter_info import AdapterInfo
from .samples import NOT_CALLED, Places, SampleDim

BASE = "__base__"
ROWS_OF_A_SAMPLE = 1 << 20
RoutePlan = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""The operator's arguments of `backends.interface.PLAN`."""


class RoutedLayer(Protocol):
    """What a route needs of a layer; `name` is for messages."""

    name: str
    group: LayerGroup
    training: bool


class Sees(Protocol):
    """What layers show their inputs and outputs to."""

    def see(self, layer: str, x: Tensor, y: Tensor) -> Tensor:
        """Sees one call of a layer without adapters, and returns the output to go on with."""


class LayerReads(NamedTuple):
    """What a layer reads beside its route: checkpointing reads it again when it recomputes the layer."""

    names: tuple[str, ...]
    training: bool
    group: LayerGroup
    backend: str | None
    updates: int


class SharedInput(Protocol):
    """Layers that share their input and may be computed in one call; see `layers.fused_projections`."""

    def output(self, layer: Any, x: Tensor, active: RouteTensors) -> Tensor | None:
        """Returns `y` of one layer, or None if the layer computes alone."""

    def forget(self) -> None:
        """Drops outputs that no layer has taken: a route has been left."""

    def forget_adapters(self) -> None:
        """Drops what is kept of adapters: one of them goes."""


@dataclass(eq=False)
class RouteTensors:
    """The operator's arguments for the layers of one group. Everything that varies is a tensor.

    Attributes:
        rows_tensor: empty, `[rows, 0]`. A compiled graph compares its size with x's; so it is not compiled
            again for each number of rows.
        mixed: whether the route's rows belong to several adapters.
        layout: the rows of each adapter as numbers; its adapters are indices in `names`.
        shares: which `FusedProjections` compute together along this route.
        kept: other tensors that the group's layers make of the route once.
        observer: sees what layers without an adapter on this route do.
    """

    names: tuple[str, ...]
    rows: int
    rows_tensor: Tensor
    mixed: bool
    segments: Tensor
    scaling: Tensor
    dropout_p: Tensor | None
    dropout_rng: Tensor | None
    layout: SegmentLayout
    shares: dict[Any, bool] = field(default_factory=dict)
    kept: dict[Any, Any] = field(default_factory=dict)
    observer: Sees | None = None
    _subtracted: dict[tuple[str, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def plan(self, layer: Tensor | None) -> RoutePlan:
        """Returns the operator's arguments of `backends.interface.PLAN`.

        Args:
            layer: index of the layer, or of each of several that share x; None = nothing is dropped.

        Raises:
            RuntimeError: a CUDA graph is being captured, and something is dropped.
        """
        if layer is None:
            return self.segments, self.scaling, None, None, None
        if self.dropout_p is not None and not torch.compiler.is_compiling():
            refuse_capture(self.segments.device)
        return self.segments, self.scaling, self.dropout_p, self.dropout_rng, layer

    @torch.inference_mode(False)
    def subtracted(self, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Returns `segments` and `-scaling` of some of the adapters; other rows have none. Built once."""
        if names not in self._subtracted:
            index = [self.names.index(name) for name in names]
            places = [index.index(i) if i in index else -1 for i in range(len(self.names))]
            table = to_device(torch.tensor([*places, -1], device="cpu"), self.segments.device)
            segments = self.segments.clone()
            segments[:, 2] = table[self.segments[:, 2]]
            self._subtracted[names] = segments, -self.scaling[index]
        return self._subtracted[names]

    def owners(self) -> Tensor:
        """Returns `[rows]` int64: the index in `names` of each row's adapter, `len(names)` for none."""
        return self._owners() if torch.compiler.is_compiling() else self.keep("owners", self._owners)

    @torch.inference_mode(False)
    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """Returns what `make` makes, once along this route."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def _owners(self) -> Tensor:
        begins, ends, adapters, _ = self.segments.unbind(1)
        rows, nobody = self.rows_tensor.shape[0], len(self.names)
        changes = torch.zeros(rows + 1, dtype=torch.int64, device=self.segments.device)
        other = torch.where(adapters < 0, 0, adapters - nobody)
        changes.index_add_(0, begins, other).index_add_(0, ends, -other)
        return changes.cumsum(0)[:-1] + nobody


@dataclass(eq=False)
class LayerGroup:
    """Layers with the same adapters, scalings and dropouts: they share the tensors of a route.

    Attributes:
        adapters: names, in the router's order.
        dtype: of the scalings, see `scaling_dtype`.
        active: tensors of the entered route.
    """

    adapters: tuple[str, ...]
    scaling: tuple[float, ...]
    dropout: tuple[float, ...]
    device: torch.device
    dtype: torch.dtype
    active: RouteTensors | None = None
    _constants: dict[tuple[str, ...], tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    def constants(self, names: tuple[str, ...]) -> tuple[Tensor, Tensor | None]:
        """Returns `scaling` and `dropout_p` of these adapters; `dropout_p` is None if none of them drops."""
        if names not in self._constants:
            index = [self.adapters.index(name) for name in names]
            p = [self.dropout[i] for i in index]
            self._constants[names] = (
                torch.tensor([self.scaling[i] for i in index], dtype=self.dtype, device=self.device),
                torch.tensor(p, dtype=torch.float32, device=self.device) if any(p) else None,
            )
        return self._constants[names]

    def settings(self, name: str) -> tuple[float, float]:
        """Returns scaling and dropout of an adapter; zeros if it is not on these layers."""
        if name not in self.adapters:
            return 0.0, 0.0
        index = self.adapters.index(name)
        return self.scaling[index], self.dropout[index]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "active": None, "_constants": {}}


@dataclass(eq=False)
class Route:
    """One forward pass: adapter names, the rows they own, their dropout seeds and steps.

    Attributes:
        names: adapters, in the order in which `layout` or `samples` count them.
        seeds: dropout seed of each adapter.
        steps: dropout step of each adapter.
        layout: rows of each adapter; None if they follow from `samples`.
        samples: adapter of each sample of the batch, -1 = base only; if empty, all rows are names[0]'s.
        automatic: whether the steps are the router's own counter.
        recorded: whether a training forward pass along it has ended.
        called: whether the model itself was called along it; the model records training passes.
        trained: whether a layer was called along it with gradients on.
        rows: number of rows that layers will see, if it is known when the route is entered.
        batch: samples of the forward pass, or of the encoder's.
        each: rows of each of these samples, as far as the batch tells.
        copies: adjacent copies of each sample that `generate` makes: beams, or several return sequences.
        places: where these samples lie in the layers' inputs, as far as that had to be found.
        observer: sees what layers without an adapter do; see `observe`.
        infos: what the model knew of the adapters.
        read: what each layer has read beside the route, which a recomputation must find again; None: it has
            been called in several ways.
    """

    names: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: tuple[int, ...]
    layout: SegmentLayout | None = None
    samples: tuple[int, ...] = ()
    automatic: bool = False
    recorded: bool = False
    called: bool = False
    trained: bool = False
    rows: int | None = None
    batch: int = 1
    each: int = 1
    copies: int = 1
    places: Places | None = None
    observer: Sees | None = None
    infos: tuple[AdapterInfo, ...] = ()
    read: dict[str, LayerReads | None] = field(default_factory=dict)
    _built: dict[Any, Any] = field(default_factory=dict)

    def advanced(self, step: int) -> Route:
        """Returns a route with the same rows at the router's next step."""
        steps = (step,) * len(self.names)
        return replace(self, steps=steps, recorded=True, called=False, trained=False, read={}, _built={})

    def observe(self, observer: Sees) -> None:
        """Lets layers without an adapter on this route show what they do, also when they are recomputed."""
        self.observer = observer
        for built in self._built.values():
            if isinstance(built, RouteTensors):
                built.observer = observer

    @torch.inference_mode(False)  # cached: inference tensors could not train later
    def tensors(self, group: LayerGroup, rows: int) -> RouteTensors:
        """Returns the operator's tensors for a layer group and a number of rows; built once."""
        key = (group, rows)
        if key not in self._built:
            names = tuple(name for name in self.names if name in group.adapters)
            place = {name: index for index, name in enumerate(names)}
            mapping = tuple(place.get(name, -1) for name in self.names)
            self._built[key] = RouteTensors(
                names,
                rows,
                torch.empty(rows, 0, device=group.device),
                self.mixed,
                self._table(mapping, rows, group.device),
                *group.constants(names),
                self._rng(names, group.device),
                self._remapped(mapping, rows),
                observer=self.observer,
            )
        return self._built[key]

    def _table(self, mapping: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
        key = ("table", mapping, rows, device)
        if key not in self._built:
            self._built[key] = self._remapped(mapping, rows).table(device)
        return self._built[key]

    def _remapped(self, mapping: tuple[int, ...], rows: int) -> SegmentLayout:
        key = ("layout", mapping, rows)
        if key not in self._built:
            self._built[key] = self.layout_of(rows).remap(mapping)
        found: SegmentLayout = self._built[key]
        return found

    def _rng(self, names: tuple[str, ...], device: torch.device) -> Tensor:
        key = ("rng", names, device)
        if key not in self._built:
            index = [self.names.index(name) for name in names]
            table = rng_table([self.seeds[i] for i in index], [self.steps[i] for i in index])
            self._built[key] = to_device(table, device)
        return self._built[key]

    def layout_of(self, rows: int) -> SegmentLayout:
        """Returns the segments of an input with this number of rows; its adapters are indices in `names`."""
        if self.layout is not None:
            return self.layout
        # Rows may be a selection of one adapter's rows, as inside a mixture of experts.
        selects = len(set(self.samples)) == 1 and rows % len(self.samples) != 0
        if not self.samples or selects:
            return SegmentLayout.from_lengths([rows], [0 if self.names else -1])
        each = rows // len(self.samples)
        # One segment per sample: if neighbours were merged, other samples would decide where sums are cut.
        row0 = _first_rows(self.samples, max(each, ROWS_OF_A_SAMPLE))
        return SegmentLayout.from_lengths([each] * len(self.samples), self.samples, row0)

    @cached_property
    def owners(self) -> frozenset[str]:
        """The names of the adapters that have rows; `BASE` if there are rows without one."""
        if self.layout is None:
            found = set(self.samples) or {0 if self.names else -1}
        else:
            lengths = zip(self.layout.adapters, self.layout.lengths, strict=True)
            found = {adapter for adapter, rows in lengths if rows}
        return frozenset(self.names[adapter] if adapter >= 0 else BASE for adapter in found)

    @cached_property
    def mixed(self) -> bool:
        """Whether the rows belong to several adapters, or some of them to none."""
        return len(self.owners) > 1

    def place_in(self, layer: str, x: Tensor) -> SampleDim | None:
        """Returns where samples lie in a layer's input; None if its flattened rows are in the route's order.

        Raises ValueError if that is unknown, the rows are not ordered by sample, or their number is wrong.
        """
        rows = x.numel() // x.shape[-1]
        if self.layout is not None and rows != self.layout.total_rows:
            raise ValueError(
                f"layer {layer}: the active route has {self.layout.total_rows} rows, got x of shape "
                f"{list(x.shape)}"
            )
        if not self.mixed or (self.layout is not None and self.places is None):
            return None
        if self.places is None and (x.is_meta or isinstance(x, FakeTensor)):
            return None  # it holds no numbers
        place = NOT_CALLED if self.places is None else self.places.of(layer, x.shape)
        if self.layout is not None and isinstance(place, SampleDim) and not place.is_plain:
            place = "its rows are not in the order of the route; use adapter_names= instead"
        if isinstance(place, str):
            raise ValueError(
                f"layer {layer}: cannot tell which rows of x, of shape {list(x.shape)}, belong to which "
                f"sample: {place}; use one adapter for the whole batch, or do not target this layer"
            )
        return None if place.is_plain else place


def _first_rows(samples: Sequence[int], stride: int) -> list[int]:
    """Returns `row0` of each sample: a multiple of `stride`, so that padding shifts no later sample's masks.

    Counts each adapter's samples, modulo the 32 bits that masks depend on.
    """
    seen: dict[int, int] = {}
    row0 = []
    for adapter in samples:
        ordinal = seen.get(adapter, 0) if adapter >= 0 else 0
        seen[adapter] = ordinal + 1
        row0.append(ordinal * stride % (1 << 32))
    return row0


def only_used(
    names: tuple[str, ...], steps: Sequence[int] | None, layout: SegmentLayout
) -> tuple[tuple[str, ...], Sequence[int] | None, SegmentLayout]:
    """Leaves out adapters without rows: they get no gradient and take part in no backward pass."""
    used = sorted({i for i, rows in zip(layout.adapters, layout.lengths, strict=True) if rows and i >= 0})
    if len(used) == len(names):
        return names, steps, layout
    place = {index: position for position, index in enumerate(used)}
    layout = layout.remap([place.get(index, -1) for index in range(len(names))])
    return tuple(names[i] for i in used), None if steps is None else [steps[i] for i in used], layout
