"""A route: which rows of a forward pass belong to which adapter, as tensors for each group of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..dropout import rng_table
from ..segments import SegmentLayout

BASE = "__base__"
ROWS_OF_A_SAMPLE = 1 << 20


@dataclass(frozen=True)
class LayerSpec:
    """What one adapter is in one layer."""

    rank: int
    scaling: float
    dropout: float


@dataclass(eq=False)
class RouteTensors:
    """What the operator is called with by the layers of one group. Everything that varies is a tensor.

    `shares` says which `Siblings` compute together along this route.
    """

    names: tuple[str, ...]
    rows: int
    segments: Tensor
    scaling: Tensor
    dropout_p: Tensor | None
    dropout_rng: Tensor | None
    shares: dict[Any, bool] = field(default_factory=dict)


@dataclass(eq=False)
class LayerGroup:
    """Layers that have the same adapters, scalings and dropouts: they share the tensors of a route."""

    adapters: tuple[str, ...]
    scaling: tuple[float, ...]
    dropout: tuple[float, ...]
    device: torch.device
    active: RouteTensors | None = None
    _constants: dict[tuple[str, ...], tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    def constants(self, names: tuple[str, ...]) -> tuple[Tensor, Tensor | None]:
        """`scaling` and `dropout_p` of these adapters; `dropout_p` is None where nobody drops anything."""
        if names not in self._constants:
            index = [self.adapters.index(name) for name in names]
            p = [self.dropout[i] for i in index]
            self._constants[names] = (
                torch.tensor([self.scaling[i] for i in index], dtype=torch.float32, device=self.device),
                torch.tensor(p, dtype=torch.float32, device=self.device) if any(p) else None,
            )
        return self._constants[names]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "active": None, "_constants": {}}


@dataclass(eq=False)
class Route:
    """One forward pass: adapter names, the rows they own, their dropout seeds and steps.

    Attributes:
        names: adapters, in the order in which `layout` or `samples` count them.
        seeds: dropout seed of each.
        steps: dropout step of each.
        layout: rows of each, or None if they follow from `samples`.
        samples: adapter of each sample of the batch, -1 = base only; an empty tuple: all rows are names[0]'s.
        automatic: whether the steps are the router's own counter.
        recorded: whether a training forward pass has gone along it to the end.
        called: whether the model itself was called along it, which records what trains.
        trained: whether a layer was called along it with gradients on.
        rows: rows that layers will see, where that is known when the route is entered.
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
    _built: dict[Any, Any] = field(default_factory=dict)

    @torch.inference_mode(False)  # cached: tensors of inference mode could not train later
    def tensors(self, group: LayerGroup, rows: int) -> RouteTensors:
        """The operator's tensors for one group of layers and a number of rows; built once."""
        key = (group, rows)
        if key not in self._built:
            names = tuple(name for name in self.names if name in group.adapters)
            place = {name: index for index, name in enumerate(names)}
            mapping = tuple(place.get(name, -1) for name in self.names)
            self._built[key] = RouteTensors(
                names,
                rows,
                self._table(mapping, rows, group.device),
                *group.constants(names),
                self._rng(names, group.device),
            )
        return self._built[key]

    def _table(self, mapping: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
        key = ("table", mapping, rows, device)
        if key not in self._built:
            self._built[key] = self._layout(rows).remap(mapping).table(device)
        return self._built[key]

    def _rng(self, names: tuple[str, ...], device: torch.device) -> Tensor:
        key = ("rng", names, device)
        if key not in self._built:
            index = [self.names.index(name) for name in names]
            table = rng_table([self.seeds[i] for i in index], [self.steps[i] for i in index])
            self._built[key] = table.to(device)
        return self._built[key]

    def _layout(self, rows: int) -> SegmentLayout:
        if self.layout is not None:
            return self.layout
        if not self.samples or self._selects(rows):
            return SegmentLayout.from_lengths([rows], [0 if self.names else -1])
        each = rows // len(self.samples)
        # One segment per sample: merged neighbours would let batch-mates decide where sums are cut.
        row0 = _first_rows(self.samples, max(each, ROWS_OF_A_SAMPLE))
        return SegmentLayout.from_lengths([each] * len(self.samples), self.samples, row0)

    def _selects(self, rows: int) -> bool:
        """Whether these are a selection of rows that one adapter owns, as inside a mixture of experts."""
        return len(set(self.samples)) == 1 and rows % len(self.samples) != 0

    def accepts(self, x: Tensor, rows: int) -> bool:
        """Whether the rows of a layer's input are those that this route describes."""
        if self.layout is not None:
            return rows == self.layout.total_rows
        if len(set(self.samples)) <= 1 or rows == self.rows:
            return True
        return x.dim() > 2 and x.shape[0] % len(self.samples) == 0


def _first_rows(samples: Sequence[int], stride: int) -> list[int]:
    """`row0` of each sample: a multiple of `stride`, so that padding moves no later sample's masks.

    Counts the samples of the same adapter, modulo the 32 bits that masks are a function of.
    """
    seen: dict[int, int] = {}
    row0 = []
    for adapter in samples:
        ordinal = seen.get(adapter, 0) if adapter >= 0 else 0
        seen[adapter] = ordinal + 1
        row0.append(ordinal * stride % (1 << 32))
    return row0
