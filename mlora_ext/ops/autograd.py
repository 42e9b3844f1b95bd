"""The operator in eager mode, with its one autograd formula.

Our own `torch.autograd.Function` costs a few microseconds a call; the function that `torch.library` generates
costs about ten times that. Backward saves x itself, a plain weight and s, and never a copy or a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backends import one_layer
from ..backends.interface import PLAN, Layer, PlanTensors
from ..backends.selection import Backend
from ..frozen.rows import dense_rows
from ..frozen.weight import FrozenWeight, FusedOperands
from ..library import check_library
from ..once_differentiable import once_differentiable
from . import registration  # noqa: F401 - tells torch.library of the operators

_CHANGED = (
    "{}: was changed in place between forward and backward, for example by an optimizer step; run backward "
    "before you change it"
)


def lora_linear(
    x: Tensor,
    frozen: FrozenWeight,
    bias: Tensor | None,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    segments: Tensor,
    scaling: Tensor,
    dropout_p: Tensor | None,
    dropout_rng: Tensor | None,
    layer: Tensor | None,
    backend: Backend = "cpu",
) -> Tensor:
    """Returns `y [T, O]` of `mlora_ext::lora_linear`, differentiable once in `x`, `lora_a` and `lora_b`."""
    check_library()
    plan = (segments, scaling, dropout_p, dropout_rng, layer)
    if torch.compiler.is_compiling():
        y, _ = torch.ops.mlora_ext.lora_linear(x, frozen.dense(), bias, lora_a, lora_b, *plan, None)
        return y
    operands = frozen.fused(x)
    if not torch.is_grad_enabled():
        return one_layer.forward(backend, x, frozen, operands, bias, lora_a, lora_b, plan)[0]
    how = _How(frozen, operands, backend)
    weight = None if operands is None else operands.weight
    return _LoRALinear.apply(x, weight, bias, plan, how, len(lora_a), *lora_a, *lora_b)


@dataclass(frozen=True, eq=False)
class _How:
    frozen: FrozenWeight
    operands: FusedOperands | None
    backend: Backend


class _LoRALinear(torch.autograd.Function):
    """One layer in eager mode. Tensor lists are spread over the arguments, as `Function` asks.

    Adapters and plan are kept outside of the saved tensors, with our own version check. So hooks on saved
    tensors see only those that are worth moving.
    """

    @staticmethod
    def forward(ctx: Any, x, weight, bias, plan, how, n, *adapters):  # type: ignore[no-untyped-def]
        lora_a, lora_b = adapters[:n], adapters[n:]
        y, saved = one_layer.forward(how.backend, x, how.frozen, how.operands, bias, lora_a, lora_b, plan)
        if True in ctx.needs_input_grad:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x, weight, *saved)
            ctx.lora_a, ctx.lora_b, ctx.plan, ctx.how = lora_a, lora_b, plan, how
            ctx.versions = versions_of(*adapters, *plan)
        return y

    @staticmethod
    @once_differentiable(lambda ctx: (ctx.saved_tensors[0], *ctx.lora_a, *ctx.lora_b))
    def backward(ctx: Any, dy: Tensor | None):  # type: ignore[no-untyped-def]
        needs, n = ctx.needs_input_grad, len(ctx.lora_a)
        if dy is None:
            return (None,) * len(needs)
        if versions_of(*ctx.lora_a, *ctx.lora_b, *ctx.plan) != ctx.versions:
            raise RuntimeError(_changed(ctx))
        x, weight, *saved = ctx.saved_tensors
        wanted = needs[0], True in needs[6 : 6 + n], True in needs[6 + n :]
        how = ctx.how
        operands = None if weight is None else how.operands._replace(weight=weight)
        dx, da, db = one_layer.backward(
            how.backend, dense_rows(dy), x, how.frozen, operands,
            ctx.lora_a, ctx.lora_b, tuple(saved), ctx.plan, wanted,
        )  # fmt: skip
        none: Sequence[None] = (None,) * n
        return (dx if wanted[0] else None, None, None, None, None, None, *(da or none), *(db or none))


@dataclass(frozen=True, eq=False)
class LayerOperands:
    """One of several layers that share x.

    Attributes:
        frozen: W `[d_out, d_in]`.
        bias: `[d_out]` or None, frozen.
        lora_a: per adapter `[r_i, d_in]`, all of one dtype: that of x, or fp32.
        lora_b: per adapter `[d_out, r_i]`, likewise.
    """

    frozen: FrozenWeight
    bias: Tensor | None
    lora_a: Sequence[Tensor]
    lora_b: Sequence[Tensor]


def lora_linear_fused(
    x: Tensor,
    operands: Sequence[LayerOperands],
    plan: PlanTensors,
    backend: Backend,
) -> Sequence[Tensor]:
    """Returns `y` of several layers that share x, adapters and plan; otherwise as `lora_linear`."""
    adapters = [a for layer in operands for a in layer.lora_a] + [
        b for layer in operands for b in layer.lora_b
    ]
    return _LoRAFused.apply(x, operands, plan, backend, *adapters)  # type: ignore[no-any-return]


class _LoRAFused(torch.autograd.Function):
    """As `_LoRALinear`, for several layers as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, x, operands, plan, backend, *adapters):  # type: ignore[no-untyped-def]
        fused = [layer.frozen.fused(x) for layer in operands]
        weights = [None if one is None else one.weight for one in fused]
        layers = [
            Layer(layer.frozen, weight, layer.bias) for layer, weight in zip(operands, weights, strict=True)
        ]
        lora_a, lora_b = adapters[: len(adapters) // 2], [layer.lora_b for layer in operands]
        with torch._C._AutoDispatchBelowAutograd():
            ys, saved = one_layer.forward_of(backend, x, layers, lora_a, lora_b, plan)
        if True in ctx.needs_input_grad:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x, *weights, *saved)
            ctx.operands, ctx.lora_a, ctx.backend = operands, lora_a, backend
            ctx.adapters, ctx.plan = adapters, plan
            ctx.versions = versions_of(*adapters, *plan)
        return tuple(ys)

    @staticmethod
    @once_differentiable(lambda ctx: (ctx.saved_tensors[0], *ctx.adapters))
    def backward(ctx: Any, *dys: Tensor | None):  # type: ignore[no-untyped-def]
        needs, n = ctx.needs_input_grad, len(ctx.lora_a)
        nothing = [None] * len(needs)
        used = [i for i, dy in enumerate(dys) if dy is not None]
        if not used:
            return tuple(nothing)
        if versions_of(*ctx.adapters, *ctx.plan) != ctx.versions:
            raise RuntimeError(
                _CHANGED.format(f"an adapter of {len(dys)} layers that share x, or their plan")
            )
        x, *rest = ctx.saved_tensors
        weights, saved = rest[: len(dys)], rest[len(dys) :]
        each = n // len(dys)
        wanted = needs[0], True in needs[4 : 4 + n], True in needs[4 + n :]
        layers = [Layer(ctx.operands[i].frozen, weights[i]) for i in used]
        lora_a = [a for i in used for a in ctx.lora_a[i * each : (i + 1) * each]]
        lora_b = [ctx.operands[i].lora_b for i in used]
        plan = ctx.plan
        if len(used) < len(dys):
            saved = [torch.stack([one[i] for i in used]) for one in saved]
            widest = max(a.shape[0] for a in lora_a)  # rows of s are as wide as these layers' largest rank
            padded = -(-widest // 8) * 8 if x.element_size() == 2 else widest
            saved[0] = saved[0][..., :padded].contiguous()
            layers_left = None if plan[-1] is None else torch.stack([plan[-1][i] for i in used])
            plan = (*plan[:-1], layers_left)
        rows = [dense_rows(dy) for dy in dys if dy is not None]
        with torch._C._AutoDispatchBelowAutograd():
            dx, da, db = one_layer.backward_of(
                ctx.backend, rows, x, layers, lora_a, lora_b, tuple(saved), plan, wanted
            )
        result: list[Tensor | None] = [dx if wanted[0] else None, *nothing[1:]]
        for place, i in enumerate(used):
            a, b = 4 + i * each, 4 + n + i * each
            if da:
                result[a : a + each] = da[place * each : (place + 1) * each]
            if db[place]:
                result[b : b + each] = db[place]
        return tuple(result)


def versions_of(*tensors: Tensor | None) -> list[int]:
    """Returns how often each tensor has been changed in place; 0 for one that counts nothing."""
    try:
        return [0 if tensor is None else tensor._version for tensor in tensors]
    except RuntimeError:  # a tensor made in inference mode counts no versions; it needs no gradient
        return [0 if t is None or t.is_inference() else t._version for t in tensors]


def _changed(ctx: Any) -> str:
    """Returns the message that names the first tensor changed since the forward pass."""
    n = len(ctx.lora_a)
    names = [f"lora_a[{i}]" for i in range(n)] + [f"lora_b[{i}]" for i in range(n)] + [*PLAN]
    now = versions_of(*ctx.lora_a, *ctx.lora_b, *ctx.plan)
    name = next(name for name, new, old in zip(names, now, ctx.versions, strict=True) if new != old)
    return _CHANGED.format(name)
