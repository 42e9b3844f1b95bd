"""A mixture's experts with the low-rank parts of many adapters.

Rows stand once for each expert that they go to, sorted by expert and then by adapter. Letters: T rows of the
batch, K experts of a row, S = T · K, D = d_in, O = d_out, E experts, N adapters. Everything stays on the
device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ..frozen.base_gemm import frozen_linear
from ..frozen.experts import ExpertsWeight, Groups
from ..never_compiled import never_compiled
from ..ops.autograd import lora_linear_held
from ..ops.experts import hold_experts, lora_experts
from ..ops.held import HeldAdapters
from ..routing.route import RouteTensors
from .parameter_layer import ParameterLayer


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """The sorted rows. Within an expert and an adapter they keep their order.

    Attributes:
        chosen: K.
        order: `[S]` int64: which of the T · K choices each sorted row is.
        places: `[S]` int64: the sorted row of each choice; the inverse of `order`.
        bounds: `[E · (N + 1) + 1]` int64: where the rows of each expert and adapter begin; within an expert,
            rows without an adapter come last.
        groups: the rows of each expert.
    """

    chosen: int
    order: Tensor
    places: Tensor
    bounds: Tensor
    groups: Groups

    @staticmethod
    def sort(index: Tensor, owners: Tensor, experts: int, adapters: int) -> ExpertRows:
        """Sorts the rows of a batch.

        Args:
            index: `[T, K]`, the experts of each row, each in `[0, E)`.
            owners: `[T]`, the adapter of each row, N for none.
            experts: E.
            adapters: N.
        """
        slots = adapters + 1
        keys, order = (index * slots + owners.unsqueeze(1)).flatten().sort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        every = torch.arange(experts * slots + 1, device=order.device)
        bounds = torch.searchsorted(keys, every)
        groups = Groups(keys // slots, bounds[slots::slots].to(torch.int32))
        return ExpertRows(index.shape[1], order, places, bounds, groups)

    def segments(self, pairs: Tensor) -> Tensor:
        """Returns the operator's `segments`; `pairs [E · (N + 1)]` tells the pair of each, -1 for none."""
        rows = self.bounds[:-1], self.bounds[1:], pairs, torch.zeros_like(pairs)
        return torch.stack(rows, 1)

    def gather(self, x: Tensor) -> Tensor:
        """Returns the sorted rows `[S, D]` of x `[T, D]`."""
        return _Gather.apply(x, self)  # type: ignore[no-any-return]

    def scatter(self, y: Tensor) -> Tensor:
        """Returns sorted rows `[S, D]` as `[T, K, D]`."""
        return _Scatter.apply(y, self).view(-1, self.chosen, y.shape[1])  # type: ignore[no-any-return]


def pairs_of(places: tuple[int, ...], experts: int, device: torch.device) -> Tensor:
    """Returns `[E · (N + 1)]`: the index `place · E + expert` of each pair, -1 for none.

    Args:
        places: of each of the N adapters in the operator's lists, -1 for one that is not in them.
        experts: E.
        device: of the result.
    """
    place = torch.tensor((*places, -1), device="cpu").view(1, -1)
    pairs = torch.where(place < 0, -1, place * experts + torch.arange(experts, device="cpu").view(-1, 1))
    return pairs.flatten().to(device)


class _Gather(torch.autograd.Function):
    """Its gradient is a sum over each row's choices in their own order: the same bits in every run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: ExpertRows) -> Tensor:
        ctx.rows = rows
        return x.index_select(0, rows.order // rows.chosen)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.rows.scatter(dy).sum(1), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: ExpertRows) -> Tensor:
        ctx.rows = rows
        return y.index_select(0, rows.places)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dy.index_select(0, ctx.rows.order), None


_SETTINGS = ("num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate")


class MultiLoRAExperts(ParameterLayer):
    """Experts as Transformers 5 has them, `gate_up_proj [E, 2 I, D]` and `down_proj [E, D, I]`.

    Expert e of adapter n computes with `W_e + scaling B_ne A_ne`, as PEFT's `target_parameters` does. Rows
    are sorted by expert and adapter; each pair is a segment of the operator, so launches do not grow with
    experts or adapters. Rows without an adapter take the same way; a batch without adapters takes the
    module's own.
    """

    @classmethod
    def serves(cls, module: nn.Module) -> bool:
        return isinstance(module, cls) or is_experts(module)

    swapped = False
    """Whether PEFT's A and B act on the outputs and the inputs of an expert, as in `lora_experts`."""

    @classmethod
    def candidates(cls, module: nn.Module) -> tuple[str, ...]:
        return _projections(module)

    @classmethod
    def sizes(cls, module: nn.Module, parameter: str) -> tuple[int, int, int]:
        experts, rows, columns = getattr(module, parameter).shape
        return (experts, rows, columns) if module.is_transposed else (experts, columns, rows)

    def frozen_parameter(self, parameter: str, groups: Groups | None = None) -> ExpertsWeight:
        module = self.base
        return ExpertsWeight(self._parameters, parameter, module.is_transposed, module.has_bias, groups)

    @never_compiled
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Applies the experts that the router has chosen.

        Args:
            hidden_states: `[T, D]`, the rows of the active route.
            top_k_index: `[T, K]`, the experts of each row; the number of experts stands for none.
            top_k_weights: `[T, K]`.

        Returns:
            `[T, D]`.

        Raises:
            ValueError: if no route says which adapter the rows belong to, or the route describes other rows.
            RuntimeError: if another thread is inside a route.
        """
        given = hidden_states, top_k_index, top_k_weights
        return self._routed(partial(self.base, *given), given)

    def _routed(self, own: Callable[[], Tensor], given: tuple[Tensor, ...]) -> Tensor:
        """Returns `own()`, or what adapters make of tensors `[T, ...]` with the batch's rows."""
        if self.group.adapters and self.router.observer is not None:
            return self.router.observer.see(self.name, given[0], own())
        if self.group.adapters:
            active, place, batch = self.router.tensors_for(self, given[0])
            mixes = bool(active.names) or isinstance(given[0], FakeTensor)  # its own loop takes numbers
            if mixes and place is None:
                return self._with_adapters(active, *given)
            if mixes and place is not None:
                first = [place.samples_first(one, batch) for one in given]
                rows = (one.reshape(-1, one.shape[-1]) for one in first)
                return place.as_before(self._with_adapters(active, *rows).view(first[0].shape))
        return own()

    def _with_adapters(self, active: RouteTensors, x: Tensor, *choices: Tensor) -> Tensor:
        experts, (index, weights) = self.base.num_experts, choices
        weights = weights.masked_fill(index >= experts, 0.0)
        index = index.clamp(max=experts - 1)
        rows = ExpertRows.sort(index, active.owners(), experts, len(active.names))
        y = self._compute(rows.gather(x), rows, active)
        return (rows.scatter(y) * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def _compute(self, x: Tensor, rows: ExpertRows, active: RouteTensors) -> Tensor:
        """Returns `[S, D]`: the experts on sorted rows."""
        up, down = self.candidates(self.base)
        y = self._project(down, self._activate(self._project(up, x, rows, active)), rows, active)
        if getattr(self.base, "has_post_expert_norm", False):
            y = self.base.post_expert_norm(y)
        return y

    def _activate(self, hidden: Tensor) -> Tensor:
        module = self.base
        y: Tensor = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
        return y

    def _project(self, parameter: str, x: Tensor, rows: ExpertRows, active: RouteTensors) -> Tensor:
        """Returns `[S, O]`: one projection of the sorted rows, with the adapters that sit on it."""
        frozen = self.frozen_parameter(parameter, rows.groups)
        scalings = {name: self._scaling(name, parameter) for name in active.names}
        names = tuple(name for name, scaling in scalings.items() if scaling is not None)
        if not names:
            return frozen_linear(x, frozen)
        plan = (*self._plan(scalings, rows, active), None, None, None)
        if self.router.accumulates and torch.is_grad_enabled():
            held = self._held(parameter, names)
            ys = held and lora_linear_held(x, [frozen], [None], held, plan, self.router.updates)
            if ys:
                return ys[0]
        lora_a, lora_b = self._sides(parameter, names)
        return lora_experts(x, frozen, lora_a, lora_b, self.base.num_experts, plan, swapped=self.swapped)

    def _sides(self, parameter: str, names: tuple[str, ...]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Returns what acts on the inputs, and what makes the outputs."""
        lora_a, lora_b = self.matrices_of(parameter, names)
        return (lora_b, lora_a) if self.swapped else (lora_a, lora_b)

    def _plan(
        self, scalings: dict[str, float | None], rows: ExpertRows, active: RouteTensors
    ) -> tuple[Tensor, Tensor]:
        """Returns the operator's segments and scalings; an adapter that has no scaling is not on the rows."""
        experts, device = self.base.num_experts, active.segments.device
        values = [scaling for scaling in scalings.values() if scaling is not None]
        on = iter(range(len(values)))
        places = tuple(-1 if scaling is None else next(on) for scaling in scalings.values())
        pairs = active.keep((experts, places), lambda: pairs_of(places, experts, device))

        def repeated() -> Tensor:
            each = torch.tensor(values, dtype=self.group.dtype, device="cpu")
            return each.repeat_interleave(experts).to(device)

        return rows.segments(pairs), active.keep((experts, *values), repeated)

    def _scaling(self, name: str, parameter: str) -> float | None:
        own = dict(self.specs[name].parameters).get(parameter)
        return None if own is None else own.scaling

    def _held(self, parameter: str, names: tuple[str, ...]) -> HeldAdapters | None:
        kept, moves = self.tables_of(parameter)

        def make(names: tuple[str, ...]) -> HeldAdapters | None:
            sides, experts = self._sides(parameter, names), self.base.num_experts
            return hold_experts(names, *sides, experts, self.written, swapped=self.swapped)

        return kept.get(names, moves, make)


class MultiLoRAGivenRows(MultiLoRAExperts):
    """Llama 4's experts: rows come once for each expert, `[E · T, D]`, and weights are `[E, D, 2 I]`.

    PEFT takes these weights for `[E, O, D]`: its B acts on an expert's inputs, its A on the outputs.
    """

    swapped = True

    @classmethod
    def serves(cls, module: nn.Module) -> bool:
        return isinstance(module, cls) or any(
            one.__name__ == "Llama4TextExperts" for one in type(module).__mro__
        )

    @classmethod
    def candidates(cls, module: nn.Module) -> tuple[str, ...]:
        return ("gate_up_proj", "down_proj")

    @classmethod
    def sizes(cls, module: nn.Module, parameter: str) -> tuple[int, int, int]:
        experts, rows, columns = getattr(module, parameter).shape
        return experts, columns, rows

    def frozen_parameter(self, parameter: str, groups: Groups | None = None) -> ExpertsWeight:
        return ExpertsWeight(self._parameters, parameter, transposed=True, groups=groups)

    @never_compiled
    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Applies each expert to its rows; shapes as in the class. Errors: see `MultiLoRAExperts.forward`."""
        experts = self.base.num_experts
        if not self.group.adapters:
            y: Tensor = self.base(hidden_states)
            return y

        def rows_first(x: Tensor) -> Tensor:
            return x.unflatten(0, (experts, -1)).transpose(0, 1).flatten(1)

        y = self._routed(lambda: rows_first(self.base(hidden_states)), (rows_first(hidden_states),))
        return y.unflatten(1, (experts, -1)).transpose(0, 1).flatten(0, 1)

    def _with_adapters(self, active: RouteTensors, x: Tensor, *choices: Tensor) -> Tensor:
        experts = self.base.num_experts
        index = torch.arange(experts, device=x.device).expand(len(x), -1)
        rows = ExpertRows.sort(index, active.owners(), experts, len(active.names))
        y = self._compute(x.unflatten(1, (experts, -1)).flatten(0, 1)[rows.order], rows, active)
        return rows.scatter(y).flatten(1).to(x.dtype)

    def _activate(self, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        y: Tensor = up * self.base.act_fn(gate)
        return y


def is_experts(module: nn.Module) -> bool:
    """Whether a module's forward is one of Transformers' `ALL_EXPERTS_FUNCTIONS`, with 3-D parameters."""
    if not all(hasattr(module, setting) for setting in _SETTINGS):
        return False
    tensors = [module._parameters.get(name) for name in _projections(module)]
    return all(tensor is not None and tensor.dim() == 3 for tensor in tensors)


def _projections(module: nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
