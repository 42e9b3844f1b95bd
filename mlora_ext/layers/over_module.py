"""A layer that keeps a module of the base as it is, calls it, and changes its result for adapters' rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..adapters.kind import LayerSpec
from ..adapters.trained_parts import TRAINED_PARTS
from ..frozen.plain import PlainWeight
from ..ops.functional import scaling_dtype
from ..routing.route import LayerGroup, RouteTensors
from ..routing.router import Router
from ..routing.row_groups import by_adapter, row_groups
from ..routing.samples import SampleDim
from ..routing.trial_passes import Observer
from .adapter_layer import AdapterLayer, LayerPlace
from .outside_reads import ReadFromOutside, refusal_in_mixed_batch


class ModuleWeight(PlainWeight):
    """The first parameter of a module of any kind, for the module's device and dtype."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def dense(self) -> Tensor:
        return next(self._module.parameters())


@dataclass(eq=False)
class _Read:
    """A read of a layer's parameter, for the router."""

    name: str
    group: LayerGroup
    training: bool


class OverModule(AdapterLayer):
    """Keeps a module of the base, frozen, under the module's own keys: it shares the module's tensors.

    Args:
        base: the module; has parameters.
        router: shared by all layers of the model.
        name: of the layer in the model, for messages.
        index: of the layer in the whole model.
        adapter_dtype: dtype of the adapters' Parameters.

    Attributes:
        base: the module. It is no submodule: its parameters and parts are those of this layer.
    """

    base: nn.Module

    def __init__(
        self, base: nn.Module, *, router: Router, name: str, index: int, adapter_dtype: torch.dtype
    ) -> None:
        frozen = ModuleWeight(base.requires_grad_(False))
        group = LayerGroup((), (), (), frozen.device, scaling_dtype(frozen.dtype))
        super().__init__(router=router, name=name, index=index, adapter_dtype=adapter_dtype, group=group)
        self.__dict__ |= {"base": base, "_parameters": base._parameters, "_buffers": base._buffers}
        self.__dict__["_non_persistent_buffers_set"] = base._non_persistent_buffers_set
        self._modules.update(base._modules)
        self.frozen = frozen

    @classmethod
    def of(cls, module: nn.Module, place: LayerPlace) -> Self:
        dtype = place.adapter_dtype(next(module.parameters()))
        return cls(module, router=place.router, name=place.name, index=place.index, adapter_dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the base's module that this layer does not have.

        Inside a forward pass, parameters and parts of the base are those that the active adapter trains, as
        in PEFT. If adapters of a mixed batch have different ones, or it is unknown whose are read, a
        parameter gives products only (`ReadFromOutside`), and ValueError is raised for a part.
        """
        base = self.__dict__.get("base")
        try:
            found = super().__getattr__(name)
        except AttributeError:
            if base is None:
                raise
            return getattr(base, name)
        part = base is not None and (name in base._parameters or name in base._modules)
        read = part and found is not None and self.has_own(name)
        return self._read_from_outside(name, found) if read else found

    def _read_from_outside(self, name: str, found: Any) -> Any:
        trained = {adapter for adapter, spec in self.specs.items() if spec.kind in TRAINED_PARTS}
        if not trained:
            return found
        if self.router.observer is not None:
            return self._observed_read(name, found)
        try:
            route = self.router.route_of_reads(self)
        except ValueError as error:  # it may be a hook that asks for the shape only
            refusal = f"layer {self.name}: its weights are read, but not by a call of it: {error}"
        else:
            owners = frozenset() if route is None else route.owners
            if not trained & owners:
                return found
            if len(owners) == 1:
                return self.own_part(next(iter(owners)), name)
            refusal = refusal_in_mixed_batch(self.name)
        if isinstance(found, nn.Module):
            raise ValueError(refusal)
        return ReadFromOutside.of(found, partial(self._outside_product, name), refusal)

    def _observed_read(self, name: str, found: Any) -> Any:
        """Returns a matrix whose products a trial pass sees, so that it is known whose rows they are of."""
        observer = self.router.observer
        if not isinstance(observer, Observer) or not isinstance(found, Tensor) or found.dim() != 2:
            return found

        def product(x: Tensor, weight: Tensor) -> Tensor:
            return observer.see(f"{self.name}.{name}", x, x @ weight.t())

        return ReadFromOutside.of(found, product, "")

    def _outside_product(self, name: str, x: Tensor, weight: Tensor) -> Tensor:
        """Returns x times the transpose of a matrix of the base, of which adapters have their own.

        Args:
            weight: the base's.
        """
        read = _Read(f"{self.name}.{name}", self.group, self.training)
        active, place, batch = self.router.tensors_for(read, x)
        names, lead = active.names, x.shape[:-1]

        def compute(owner: int, rows: Sequence[Tensor]) -> Tensor:
            if owner < 0 or self.specs[names[owner]].kind not in TRAINED_PARTS:
                return rows[0] @ weight.t()
            return self.own_product(names[owner], name, rows[0], weight)

        return by_adapter(row_groups(active, place, batch, lead), [x], lead, compute)

    def own_product(self, adapter: str, name: str, x: Tensor, weight: Tensor) -> Tensor:
        """Returns x times the transpose of an adapter's own matrix, for the base's `weight`."""
        own: Tensor = self.own_part(adapter, name)
        return x @ own.to(weight).t()

    def has_own(self, name: str) -> bool:
        """Whether adapters have something in place of a parameter or part of the base."""
        return True

    def own_part(self, adapter: str, name: str) -> Any:
        """Returns what an adapter has in place of a parameter or part of the base."""
        return getattr(self.base, name)

    def train(self, mode: bool = True) -> Self:
        self.base.train(mode)
        return super().train(mode)

    def plain(self) -> nn.Module:
        return self.base

    def parameters_of(self, name: str) -> dict[str, nn.Parameter]:
        parts = self.shapes(self, self.specs[name])
        return {part: self._modules[part].parameter_of(name) for part in parts}  # type: ignore[union-attr, operator]

    def exported(self, name: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(own)

    def note_kinds(self) -> None:
        """Does nothing: the operator has no part in this layer."""

    def routed(self, rows: Tensor) -> tuple[RouteTensors, SampleDim | None, int] | None:
        """Returns what `Router.tensors_for` does; None if only the base computes.

        Args:
            rows: `[..., D]`, the layer's input. Only shape and, in trial passes, values count.
        """
        if not self.group.adapters:
            return None
        if self.router.observer is not None:
            seen = rows if rows.is_floating_point() else rows.double()
            self.router.observer.see(self.name, seen, seen)
            return None
        found = self.router.tensors_for(self, rows)
        return found if found[0].names else None

    def extra_repr(self) -> str:
        kept = self.base.extra_repr()
        return ", ".join([*([kept] if kept else []), f"adapters=({', '.join(self.specs)})"])


def plain_module(module: nn.Module) -> nn.Module:
    """Returns a module of the base as it was before conversion."""
    return module.plain() if isinstance(module, AdapterLayer) else module


class RowSource:
    """Mixin for layers with `trainable_tokens_delta`: their own, or that of the layer they are tied to.

    Attributes:
        received: rows by adapter that stand for those of a layer in another process, while a batch runs.
    """

    base: nn.Module
    specs: dict[str, LayerSpec]
    received: Mapping[str, Tensor] = MappingProxyType({})

    def has_own(self, name: str) -> bool:
        """Whether adapters have something in place of a part of the base: only of the weight."""
        return name == "weight"

    def own_part(self, adapter: str, name: str) -> Any:
        """Returns the weight with the rows that an adapter trains."""
        part: Any = getattr(self.base, name)
        index = torch.tensor(self.specs[adapter].tokens, device=part.device)
        return part.index_copy(0, index, self.trained_rows(adapter).to(part.dtype))

    def own_product(self, adapter: str, name: str, x: Tensor, weight: Tensor) -> Tensor:
        """Returns x times the transpose of the weight with the rows that an adapter trains.

        The base's product with other columns: no table for each adapter.
        """
        index = torch.tensor(self.specs[adapter].tokens, device=x.device)
        rows = self.trained_rows(adapter).to(getattr(self.base, name).dtype).to(weight)
        return (x @ weight.t()).index_copy(-1, index, x @ rows.t())

    def tie(self, name: str, source: nn.Module) -> None:
        """Takes the trained rows of an adapter from another layer, the same one for all that are tied."""
        self.__dict__["source"] = source  # no submodule: its Parameters are not this layer's

    def trained_rows(self, name: str) -> Tensor:
        """Returns the rows `[n, D]` that an adapter trains."""
        found = self.received.get(name)
        return self.held_rows(name) if found is None else found

    def held_rows(self, name: str) -> nn.Parameter:
        """Returns the Parameter of an adapter's rows; on the meta device if another process has it."""
        owner: Any = self.__dict__["source"] if self.specs[name].tied_to else self
        found: Mapping[str, nn.Parameter] = owner.parameters_of(name)
        return found["trainable_tokens_delta"]
