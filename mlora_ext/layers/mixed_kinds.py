"""The output of a layer whose adapters are of several kinds.

The number of calls does not grow with the adapters.

The rows of adapter i become `y = b + c_i (x Wᵀ + s_i (drop_i(x) A_iᵀ B_iᵀ + e_i))`: see `AdapterKind`. The
operator computes `v = b + x Wᵀ + s drop(x) Aᵀ Bᵀ`. One scale and one shift for each row, looked up by its
adapter, do the rest: `y = c v + ((1 - c) b + c s e)`. So the rows of plain LoRA keep the operator's bits.
DoRA with dropout also drops the input of the base product that c scales:

    y = b + (x - drop(x)) Wᵀ + c (drop(x) Wᵀ + s drop(x) Aᵀ Bᵀ)

The operator gets `drop(x)` in the rows of such adapters, and drops nothing more there; a second base product,
over these rows alone, adds `(x - drop(x)) Wᵀ`.

Letters: T rows, D = d_in, O = d_out, N adapters, V rows of adapters that drop the base's input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..adapters.kind import AdapterKind
from ..adapters.registry import adapter_kind
from ..backends.plan import rows_of
from ..frozen.base_gemm import frozen_linear
from ..frozen.weight import FrozenWeight
from ..ops.dropout import LEVELS
from ..ops.functional import lora_linear_rows, scaling_dtype
from ..ops.held import keeps_gradient
from ..ops.row_outputs import dropped_rows, keep_mask, scaled_rows, shifted_rows, stacked_rows
from ..ops.segments import SegmentLayout
from ..routing.route import RoutePlan, RouteTensors
from ..upload import to_device
from .adapter_layer import AdapterLayer
from .kept_norms import KeptNorms


class MixedLayer(AdapterLayer):
    """What this file and `own_bases` need of a layer: `MultiLoRALinear`."""

    out_features: int
    norms: KeptNorms

    def added(self, x: Tensor, active: RouteTensors, frozen: FrozenWeight) -> Tensor:
        """Returns the output over a frozen weight, with the low-rank parts of the route's adapters."""
        raise NotImplementedError

    def operator_output(
        self, x: Tensor, bias: Tensor | None, names: tuple[str, ...], plan: RoutePlan, frozen: FrozenWeight
    ) -> Tensor:
        """Returns `[..., d_out]` for adapters whose A and B are `lora_A` and `lora_B`."""
        raise NotImplementedError


def mixed_output(
    layer: MixedLayer,
    x: Tensor,
    bias: Tensor | None,
    active: RouteTensors,
    plan: RoutePlan,
    frozen: FrozenWeight,
) -> Tensor:
    """Returns `[..., O]` for x `[..., D]`; a batch of plain adapters alone takes the way of a plain layer.

    `frozen` is the layer's, or stands for it where other adapters have a base of their own.
    """
    kinds = {name: adapter_kind(layer.specs[name].kind) for name in active.names}
    if all(kind.is_plain for kind in kinds.values()):
        return layer.operator_output(x, bias, active.names, plan, frozen)
    scales, shifts = _scales_and_shifts(layer, kinds, plan[1], bias)
    given = x.reshape(-1, x.shape[-1])
    drops = _dropping(layer, kinds) if plan[2] is not None else ()
    part = _part_of(active, drops) if drops else None
    if part is None:
        y = _moved(_operator(layer, given, bias, kinds, active.names, plan, frozen), scales, shifts, active)
    else:
        given, lost = _drop(given, part, plan)
        y = _operator(layer, given, bias, kinds, active.names, part.plan_of(plan), frozen)
        y = _moved(y, scales, shifts, active)
        more = frozen_linear(lost, layer.frozen)
        y = y + more if part.rows is None else y.index_add_(0, part.rows, more)
    if y.requires_grad and not torch.compiler.is_compiling():
        normed = [name for name, kind in kinds.items() if kind.divides_by_norm]
        if normed:
            y.register_hook(layer.norms.after_backward(normed))
    return y.view(*x.shape[:-1], y.shape[-1])


def _operator(
    layer: MixedLayer,
    x: Tensor,
    bias: Tensor | None,
    kinds: Mapping[str, AdapterKind],
    names: tuple[str, ...],
    plan: RoutePlan,
    frozen: FrozenWeight,
) -> Tensor:
    """Returns `x Wᵀ + bias + s drop(x) Aᵀ Bᵀ`."""
    if not any(kind.has_own_factors for kind in kinds.values()):
        return layer.operator_output(x, bias, names, plan, frozen)
    pairs = [kinds[name].factors(layer.parameters_of(name), layer.specs[name]) for name in names]
    lora_a, lora_b = [a for a, _ in pairs], [b for _, b in pairs]
    return lora_linear_rows(x, frozen, bias, lora_a, lora_b, *plan)


def _moved(v: Tensor, scales: Tensor | None, shifts: Tensor | None, active: RouteTensors) -> Tensor:
    """Returns `v` with each row's scale and shift."""
    if scales is not None:
        return scaled_rows(v, scales, shifts, active.owners())
    return v if shifts is None else shifted_rows(v, shifts, active.owners())


def _scales_and_shifts(
    layer: MixedLayer, kinds: Mapping[str, AdapterKind], scaling: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Returns c and `(1 - c) b + c s e` of each adapter, `[N + 1, O]` in fp32 or fp64; None for 1 and 0."""
    scales, shifts = _scales(layer, kinds), _shifts(layer, kinds, scaling)
    if scales is None:
        return None, shifts
    shifts = None if shifts is None else scales * shifts
    if bias is not None:
        unscaled = (1 - scales) * bias
        shifts = unscaled if shifts is None else shifts + unscaled
    return scales, shifts


def _scales(layer: MixedLayer, kinds: Mapping[str, AdapterKind]) -> Tensor | None:
    """Returns c of each adapter, and ones: `[N + 1, O]` fp32 or fp64; None if no kind scales."""
    owns = {name: layer.parameters_of(name) for name in kinds}
    found = [kind.output_scale(owns[name], layer.specs[name]) for name, kind in kinds.items()]
    scales = _table(layer, found, 1.0)
    normed = {name: kind for name, kind in kinds.items() if kind.divides_by_norm}
    if scales is None or not normed:
        return scales
    if torch.compiler.is_compiling():
        norms = {name: _norm(layer, kind, owns[name], name) for name, kind in normed.items()}
    else:
        norms = layer.norms.of(layer, normed)
    divisors = _table(layer, [norms.get(name) for name in kinds], 1.0)
    return scales if divisors is None else scales / divisors


@torch.no_grad()
def _norm(layer: MixedLayer, kind: AdapterKind, own: Mapping[str, nn.Parameter], name: str) -> Tensor:
    """Returns the norms `[O]` inside a compiled graph, where nothing is kept."""
    a, b = kind.factors(own, layer.specs[name])
    dtype = scaling_dtype(layer.frozen.dtype)
    with torch.autocast(layer.frozen.device.type, enabled=False):
        delta = layer.specs[name].scaling * (b.detach().to(dtype) @ a.detach().to(dtype))
        return torch.linalg.vector_norm(layer.frozen.dense().to(dtype) + delta, dim=1)


def _shifts(layer: MixedLayer, kinds: Mapping[str, AdapterKind], scaling: Tensor) -> Tensor | None:
    """Returns `s e` of each adapter, and zeros: `[N + 1, O]`; None if no kind has such a bias."""
    found = [kind.low_rank_bias(layer.parameters_of(name), layer.specs[name]) for name, kind in kinds.items()]
    table = _table(layer, found, 0.0)
    if table is None:
        return None
    return table * nn.functional.pad(scaling, (0, 1)).unsqueeze(1)


def _table(layer: MixedLayer, rows: Sequence[Tensor | None], other: float) -> Tensor | None:
    """Stacks vectors `[O]`, and `other` for those that are missing and for rows without an adapter."""
    if all(row is None for row in rows):
        return None
    dtype, device = scaling_dtype(layer.frozen.dtype), layer.frozen.device
    usual = torch.full((layer.out_features,), other, dtype=dtype, device=device)
    table = [*(usual if row is None else row.to(dtype) for row in rows), usual]
    trained = [row for row in table if row.requires_grad]
    if trained and layer.router.accumulates and torch.is_grad_enabled():
        held = [row for row in trained if isinstance(row, nn.Parameter) and keeps_gradient(row)]
        if len(held) == len(trained) and not torch.compiler.is_compiling():
            return stacked_rows(table, held)
    return torch.stack(table)


def _dropping(layer: MixedLayer, kinds: Mapping[str, AdapterKind]) -> tuple[int, ...]:
    """Returns the places of adapters that drop the base's input."""
    return tuple(
        place
        for place, (name, kind) in enumerate(kinds.items())
        if kind.drops_base_input and layer.specs[name].dropout > 0
    )


@dataclass(frozen=True, eq=False)
class _Part:
    """The rows of adapters that drop the base's input, of one route.

    Attributes:
        rows: `[V]` int64, in rising order; None = all rows.
        segments: these rows alone, counted from 0, as the operator's argument.
        factors: `[V, 1]` fp32 or fp64, `1 / (1 - p)` of each row.
        dropout_p: `[N]`, of the adapters with these rows.
        others_p: `[N]`, of the other adapters, 0 for these; None if there is no other adapter.
    """

    rows: Tensor | None
    segments: Tensor
    factors: Tensor
    dropout_p: Tensor
    others_p: Tensor | None

    def plan_of(self, plan: RoutePlan) -> RoutePlan:
        """Returns the operator's plan: it drops nothing more in these rows."""
        segments, scaling, _, rng, layer = plan
        if self.others_p is None:
            return segments, scaling, None, None, None
        return segments, scaling, self.others_p, rng, layer


def _part_of(active: RouteTensors, drops: tuple[int, ...]) -> _Part | None:
    """Returns the rows of adapters at these places; None if they have none."""
    if torch.compiler.is_compiling():
        return _all_rows(active, drops)
    found: _Part | None = active.keep(drops, lambda: _made_part(active, drops))
    return found


def _made_part(active: RouteTensors, drops: tuple[int, ...]) -> _Part | None:
    assert active.dropout_p is not None
    spans = sorted(row for row in rows_of(active.segments) if row[2] in drops and row[1] > row[0])
    if not spans:
        return None
    lengths = [end - begin for begin, end, _, _ in spans]
    owners = [adapter for _, _, adapter, _ in spans]
    device = active.segments.device
    layout = SegmentLayout.from_lengths(lengths, owners, [row0 for *_, row0 in spans])
    places = torch.cat([torch.arange(begin, end, device="cpu") for begin, end, _, _ in spans])
    rows = None if len(places) == active.rows else to_device(places, device)
    counts = torch.tensor(lengths, device="cpu")
    places = torch.tensor(owners, device="cpu").repeat_interleave(counts, output_size=sum(lengths))
    factors = _factors(active).index_select(0, to_device(places, device)).unsqueeze(1)
    rest = active.dropout_p.index_fill(0, to_device(torch.tensor(drops, device="cpu"), device), 0)
    others = len(drops) < len(active.names)
    return _Part(rows, layout.table(device), factors, active.dropout_p, rest if others else None)


def _factors(active: RouteTensors) -> Tensor:
    """Returns `1 / (1 - p)` of each adapter `[N]`, for p as it is used."""
    assert active.dropout_p is not None
    levels = (active.dropout_p.to(active.scaling.dtype) * LEVELS).round()
    return LEVELS / (LEVELS - levels)


def _all_rows(active: RouteTensors, drops: tuple[int, ...]) -> _Part:
    """Returns all rows, inside a compiled graph: the number of some rows would compile it again."""
    assert active.dropout_p is not None
    whose = torch.zeros_like(active.dropout_p)
    for place in drops:
        whose[place] = 1
    factors = torch.cat([(_factors(active) - 1) * whose + 1, active.scaling.new_ones(1)])
    each = factors.index_select(0, active.owners()).unsqueeze(1)
    p = active.dropout_p
    return _Part(None, active.segments, each, p * whose, p * (1 - whose))


def _drop(x: Tensor, part: _Part, plan: RoutePlan) -> tuple[Tensor, Tensor]:
    """Returns x with the part's rows dropped, and what they lost."""
    rng, layer = plan[3:]
    assert rng is not None
    assert layer is not None
    rows = x.shape[0] if part.rows is None else part.rows.shape[0]
    keep = keep_mask(part.segments, part.dropout_p, rng, layer, rows, x.shape[1])
    return dropped_rows(x, part.rows, keep, part.factors)
