"""Copies of modules that need whole samples: heads with convolutions, batch normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..adapters.kind import TensorSpec
from ..adapters.trained_parts import TRAINED_COPY
from ..never_compiled import never_compiled
from ..routing.row_groups import by_adapter, row_groups
from .copies import TrainedCopies, acts_on_samples, why_not_copied
from .over_module import plain_module


class SampleCopies(TrainedCopies):
    """Sends the samples of each adapter through its own copy, and all others through the base's module.

    A copy with batch normalisation normalises over its own adapter's samples, as in PEFT with the adapter
    alone, and keeps running statistics of its own. They are part of PEFT's files.
    """

    served = (TRAINED_COPY,)

    @classmethod
    def serves(cls, module: nn.Module) -> bool:
        return why_not_copied(module) is None and acts_on_samples(module)

    @classmethod
    def buffer_shapes(cls, module: nn.Module) -> dict[str, TensorSpec]:
        own = plain_module(module)
        kept = own.state_dict()
        return {key: TensorSpec(tuple(b.shape)) for key, b in own.named_buffers() if key in kept}

    def tensors_of(self, name: str) -> dict[str, Tensor]:
        own = self.modules_to_save.of(name)
        buffers = dict(own.named_buffers())
        return {**super().tensors_of(name), **{key: buffers[key] for key in self.buffer_shapes(own)}}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Applies the module, or adapters' copies of it.

        Args:
            args: tensors, or lists and dicts of them: `[samples · k, ...]`, each sample's k entries adjacent.
                Arguments that hold no tensors go to every copy.

        Returns:
            What the module does: a tensor, or lists and dicts of them, with the same first dimension.

        Raises:
            ValueError: if no route says which adapter the samples belong to, rows are packed, or the first
                dimension of an argument or result does not count samples.
        """
        if not self.group.adapters:
            return self.base(*args, **kwargs)
        return self._by_sample(args, kwargs)

    @never_compiled
    def _by_sample(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, form = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        inputs = [leaves[i] for i in places]
        rows = next((tensor for tensor in inputs if tensor.dim() > 1), None)
        if rows is None:
            raise self._refusal("gets no input of two dimensions or more, the first of samples")
        self._refuse_packed()
        routed = self.routed(rows)
        if routed is None:
            return self.base(*args, **kwargs)
        active, place, batch = routed
        lead = rows.shape[:-1]
        groups = row_groups(active, place, batch, lead)
        modules = [*(self.modules_to_save.of(name) for name in active.names), self.base]
        if groups.order is None:
            return self._call_with(modules[groups.owners[0]], leaves, form)
        if place is not None or groups.dim != 0 or any(t.shape[:1] != lead[:1] for t in inputs):
            raise self._refusal("does not have samples in the first dimension of its inputs")
        results: list[pytree.TreeSpec] = []

        def compute(owner: int, own: Sequence[Tensor]) -> tuple[Any, ...]:
            mine = list(leaves)
            for i, tensor in zip(places, own, strict=True):
                mine[i] = tensor
            found, spec = pytree.tree_flatten(self._call_with(modules[owner], mine, form))
            if any(not isinstance(y, Tensor) or y.shape[:1] != own[0].shape[:1] for y in found):
                raise self._refusal("returns something that has no part for each sample")
            results.append(spec)
            return tuple(found)

        return pytree.tree_unflatten(by_adapter(groups, inputs, lead, compute), results[0])

    def _call_with(self, module: nn.Module, leaves: Sequence[Any], form: pytree.TreeSpec) -> Any:
        """Calls a copy in its own dtype; the results have the base's."""
        casts = module is not self.base and self.adapter_dtype != self.frozen.dtype
        autocast = torch.is_autocast_enabled(self.frozen.device.type)
        given = [self._as_copy(leaf) for leaf in leaves] if casts and not autocast else list(leaves)
        args, kwargs = pytree.tree_unflatten(given, form)
        y = module(*args, **kwargs)
        return pytree.tree_map(self._as_base, y) if casts else y

    def _as_copy(self, leaf: Any) -> Any:
        numbers = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(self.adapter_dtype) if numbers else leaf

    def _refuse_packed(self) -> None:
        route = None if self.router.observer is not None else self.router.route_of_reads(self)
        if route is not None and route.layout is not None and set(route.names) & set(self.specs):
            raise self._refusal(
                "needs whole samples, and the rows of this batch are packed",
                "pass adapter_names=[...] (one per sample) to the forward call",
            )

    def _refusal(self, why: str, instead: str = "use one adapter for the whole batch") -> ValueError:
        return ValueError(
            f"layer {self.name}: modules_to_save: a {type(self.base).__name__} {why}; its copies cannot be "
            f"used so: {instead}, or leave it out of modules_to_save"
        )
