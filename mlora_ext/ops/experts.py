"""The operator over experts: each pair of an adapter and an expert has rows, an A and a B of its own.

The tables of addresses have a row per pair, so launches do not grow with adapters or experts. Parameters
hold all experts of an adapter: see `mlora_ext.backends.factors`.

Letters: S rows, D = d_in, O = d_out, N adapters, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ..backends import run
from ..backends.factors import Factors, expert_factors, expert_parts, own_gradients
from ..backends.interface import Adapters, Layer, PlanTensors
from ..backends.selection import Backend, backend_for
from ..frozen.base_gemm import dense_rows, frozen_linear
from ..frozen.weight import FrozenWeight
from ..library import check_library
from ..once_differentiable import once_differentiable
from . import reference
from .autograd import versions_of
from .held import HeldAdapters, keeps_gradient
from .registration import gradient_of


def lora_experts(
    x: Tensor,
    frozen: FrozenWeight,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    experts: int,
    plan: PlanTensors,
    *,
    swapped: bool = False,
) -> Tensor:
    """Returns `y [S, O]`: the frozen product, and each pair's low-rank part on its own rows.

    Differentiable once in `x`, `lora_a` and `lora_b`.

    Args:
        x: `[S, D]`, sorted by expert, then by adapter.
        frozen: makes the product of every row with its expert's weight.
        lora_a: per adapter `[r_n · E, D]`, in PEFT's order.
        lora_b: per adapter `[O, r_n · E]`, in PEFT's order.
        experts: E.
        plan: segments and scaling of the pairs `n · E + e`, without dropout.
        swapped: whether `lora_a` holds PEFT's B `[D, r_n · E]` and `lora_b` PEFT's A `[r_n · E, O]`; a pair's
            matrices are their transposes.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    backend = backend_for(x.device, x.dtype)
    if backend == "reference":
        with torch.autocast(x.device.type, enabled=False):
            a = [part for one in lora_a for part in expert_parts(one, experts, transposed=swapped)]
            b = [part for one in lora_b for part in expert_parts(one, experts, transposed=not swapped)]
            if swapped:
                a, b = [part.T for part in a], [part.T for part in b]
            y = frozen_linear(x, frozen)
            segments, scaling, *_ = plan
            assert segments is not None
            assert scaling is not None
            return y + reference.low_rank(x, y.shape[1], a, b, segments, scaling)[0]
    check_library()
    dtypes = {one.dtype for one in (*lora_a, *lora_b)}
    if len(dtypes) > 1 or not dtypes <= {x.dtype, torch.float32}:
        lora_a, lora_b = [one.to(x.dtype) for one in lora_a], [one.to(x.dtype) for one in lora_b]
    call = _ExpertCall(frozen, experts, plan, backend, swapped)
    return _LoRAExperts.apply(dense_rows(x), call, *lora_a, *lora_b)  # type: ignore[no-any-return]


def hold_experts(
    names: tuple[str, ...],
    lora_a: Sequence[nn.Parameter],
    lora_b: Sequence[nn.Parameter],
    experts: int,
    written: set[str],
    *,
    swapped: bool = False,
) -> HeldAdapters | None:
    """Returns tables of the pairs, to whose gradients backward adds, or None, as `held.hold` does.

    For `swapped` see `lora_experts`.
    """
    if not all(map(keeps_gradient, (*lora_a, *lora_b))):
        return None
    a, b = (
        expert_factors(
            [p.detach() for p in every],
            experts,
            transposed=transposed,
            gradients=[p.grad for p in every if p.grad is not None],
        )
        for every, transposed in ((lora_a, swapped), (lora_b, not swapped))
    )
    return HeldAdapters(names, Adapters(a, b), [written])


@dataclass(frozen=True, eq=False)
class _ExpertCall:
    frozen: FrozenWeight
    experts: int
    plan: PlanTensors
    backend: Backend
    swapped: bool

    def tables(self, parameters: Sequence[Tensor]) -> Adapters:
        """Returns the tables of A, the first half, and of B."""
        half = len(parameters) // 2
        return Adapters(
            expert_factors(parameters[:half], self.experts, transposed=self.swapped),
            expert_factors(parameters[half:], self.experts, transposed=not self.swapped),
        )


class _LoRAExperts(torch.autograd.Function):
    """As `mlora_ext.ops.autograd._LoRALinear`, over tables of pairs."""

    @staticmethod
    def forward(ctx: Any, x, call, *parameters):  # type: ignore[no-untyped-def]
        if isinstance(x, FakeTensor):
            y = call.frozen.matmul(x)
            ranks = [one.shape[call.swapped] // call.experts for one in parameters[: len(parameters) // 2]]
            saved: tuple[Tensor, ...] = (x.new_empty(len(x), max(ranks)),)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                a, b = call.tables(parameters)
                (y,), saved = run.forward(call.backend, x, [Layer(call.frozen, None)], a, b, call.plan)
        if True in ctx.needs_input_grad:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x, *saved)
            ctx.call, ctx.parameters = call, parameters
            ctx.versions = versions_of(*parameters)
        return y

    @staticmethod
    @once_differentiable(lambda ctx: (ctx.saved_tensors[0], *ctx.parameters))
    def backward(ctx: Any, dy: Tensor | None):  # type: ignore[no-untyped-def]
        needs = ctx.needs_input_grad
        if dy is None:
            return (None,) * len(needs)
        if versions_of(*ctx.parameters) != ctx.versions:
            raise RuntimeError(
                "lora_a, lora_b: an adapter on experts was changed in place between forward and backward, "
                "for example by an optimizer step; run backward before you change it"
            )
        x, *saved = ctx.saved_tensors
        if isinstance(dy, FakeTensor):
            dx = ctx.call.frozen.matmul_dx(dy) if needs[0] else None
            gradients = [gradient_of(one) for one in ctx.parameters]
        else:
            dx, gradients = _backward(dense_rows(dy), x, ctx.call, ctx.parameters, tuple(saved), needs[0])
        wanted = [g if need else None for g, need in zip(gradients, needs[2:], strict=True)]
        return dx, None, *wanted


def _backward(
    dy: Tensor,
    x: Tensor,
    call: _ExpertCall,
    parameters: Sequence[Tensor],
    saved: tuple[Tensor, ...],
    need_dx: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """Returns dx, if it is wanted, and the gradients of all A and all B."""
    (a, da), (b, db) = map(_cleared, call.tables(parameters))
    layers, wanted = [Layer(call.frozen, None)], (need_dx, True, True)
    with torch._C._AutoDispatchBelowAutograd():
        dx, _, _ = run.backward(call.backend, [dy], x, layers, a, b, saved, call.plan, wanted)
        return dx if need_dx else None, own_gradients(parameters, [*da, *db])


def _cleared(table: Factors) -> tuple[Factors, list[Tensor]]:
    """Returns a table with zeros for its gradients, and these."""
    filled, views = replace(table, add=True).new_gradients()
    assert filled.into is not None
    filled.into[0].zero_()
    return filled, views
