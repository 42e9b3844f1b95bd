"""The operator in eager mode: `torch.autograd.Function` costs a few microseconds a call, where the function
that `torch.library` generates costs some ten times that.

The formula is that of `_ops`; saved are x itself, the weights and s, never a copy or a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backends.gpu.operator import Batch, Into, Layer
from ..backends.selection import Backend, gpu_operator
from .library import (
    NOT_PACKED,
    PLAN,
    Gradients,
    Packed,
    PlanTensors,
    check_library,
    dense_rows,
    forward,
    gradients,
)

_CHANGED = (
    "{}: modified by an in-place operation between forward and backward, as by an optimizer step; run the "
    "backward pass first"
)


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    segments: Tensor,
    scaling: Tensor,
    dropout_p: Tensor | None,
    dropout_rng: Tensor | None,
    layer: Tensor | None,
    packed: Packed = NOT_PACKED,
    backend: Backend = "cpu",
    accumulates: bool = False,
) -> Tensor:
    """`y` of `mlora_ext::lora_linear`, differentiable once in `x`, `lora_a` and `lora_b`.

    `packed` holds the weight for the forward and for the backward product; a compiled graph goes without.
    With `accumulates`, backward adds to the `grad` of fp32 adapters where all of them have one, in place and
    past any hooks on their nodes; only `Tensor.backward` without `inputs=` may then be used.
    """
    check_library()
    if torch.compiler.is_compiling():
        y, _ = torch.ops.mlora_ext.lora_linear(
            x, weight, bias, lora_a, lora_b, segments, scaling, dropout_p, dropout_rng, layer, None
        )
        return y
    plan = (segments, scaling, dropout_p, dropout_rng, layer)
    if not torch.is_grad_enabled():
        return forward(backend, x, weight, bias, lora_a, lora_b, plan, packed[0])[0]
    how = _How(packed, backend, accumulates)
    return _LoRALinear.apply(x, weight, bias, plan, how, len(lora_a), *lora_a, *lora_b)


@dataclass(frozen=True, eq=False)
class _How:
    packed: Packed
    backend: Backend
    accumulates: bool


class _LoRALinear(torch.autograd.Function):
    """Eager mode. Tensor lists are spread over the arguments, as `Function` asks.

    Saved are x itself, the weight and s; never a copy or a mask. Adapters and plan are kept beside them, with
    a version check of our own, so that hooks on saved tensors see only what is worth moving.
    """

    @staticmethod
    def forward(ctx: Any, x, weight, bias, plan, how, n, *adapters):  # type: ignore[no-untyped-def]
        lora_a, lora_b = adapters[:n], adapters[n:]
        y, s = forward(how.backend, x, weight, bias, lora_a, lora_b, plan, how.packed[0])
        if True in ctx.needs_input_grad:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x, weight, s)
            ctx.lora_a, ctx.lora_b, ctx.plan, ctx.how = lora_a, lora_b, plan, how
            ctx.versions = _versions(*adapters, *plan)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None):  # type: ignore[no-untyped-def]
        needs, n = ctx.needs_input_grad, len(ctx.lora_a)
        if dy is None:
            return (None,) * len(needs)
        if _versions(*ctx.lora_a, *ctx.lora_b, *ctx.plan) != ctx.versions:
            raise RuntimeError(_changed(ctx))
        x, weight, s = ctx.saved_tensors
        wanted = needs[0], True in needs[6 : 6 + n], True in needs[6 + n :]
        how = ctx.how
        into = _existing(ctx.lora_a, ctx.lora_b) if how.accumulates and all(needs[6:]) else None
        dx, da, db = gradients(
            how.backend, dy, x, weight, ctx.lora_a, ctx.lora_b, s, ctx.plan, how.packed[1], wanted, into
        )
        return (dx, None, None, None, None, None, *da, *db)


@dataclass(frozen=True, eq=False)
class LayerOperands:
    """One of several layers that are given the same x.

    Attributes:
        weight: `[d_out, d_in]`, frozen.
        bias: `[d_out]` or None, frozen.
        lora_a: per adapter `[r_i, d_in]`, all of one dtype: that of x, or fp32.
        lora_b: per adapter `[d_out, r_i]`, likewise.
    """

    weight: Tensor
    bias: Tensor | None
    lora_a: Sequence[Tensor]
    lora_b: Sequence[Tensor]


def lora_linear_fused(
    x: Tensor,
    operands: Sequence[LayerOperands],
    plan: PlanTensors,
    backend: Backend,
    accumulates: bool = False,
) -> Sequence[Tensor]:
    """`y` of several layers that share x, adapters and plan, differentiable once in x and the adapters.

    `accumulates` as in `lora_linear`.
    """
    adapters = [a for layer in operands for a in layer.lora_a] + [
        b for layer in operands for b in layer.lora_b
    ]
    return _LoRAFused.apply(x, operands, plan, backend, accumulates, *adapters)  # type: ignore[no-any-return]


class _LoRAFused(torch.autograd.Function):
    """As `_LoRALinear`, for several layers; theirs is one node of the graph."""

    @staticmethod
    def forward(ctx: Any, x, operands, plan, backend, accumulates, *adapters):  # type: ignore[no-untyped-def]
        layers = [Layer(layer.weight, layer.bias, layer.lora_b) for layer in operands]
        lora_a, batch = adapters[: len(adapters) // 2], Batch(*plan)
        with torch._C._AutoDispatchBelowAutograd():
            ys, s = gpu_operator(backend).forward(x, layers, lora_a, batch)
        if True in ctx.needs_input_grad:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x, s, *(layer.weight for layer in layers))
            ctx.layers, ctx.lora_a, ctx.batch, ctx.backend = layers, lora_a, batch, backend
            ctx.adapters, ctx.plan, ctx.accumulates = adapters, plan, accumulates
            ctx.versions = _versions(*adapters, *plan)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None):  # type: ignore[no-untyped-def]
        needs, n = ctx.needs_input_grad, len(ctx.lora_a)
        nothing = [None] * len(needs)
        used = [i for i, dy in enumerate(dys) if dy is not None]
        if not used:
            return tuple(nothing)
        if _versions(*ctx.adapters, *ctx.plan) != ctx.versions:
            raise RuntimeError(
                _CHANGED.format(f"an adapter of {len(dys)} layers that share x, or their plan")
            )
        x, s, *weights = ctx.saved_tensors
        each = n // len(dys)
        wanted = needs[0], True in needs[5 : 5 + n], True in needs[5 + n :]
        layers = [replace(ctx.layers[i], weight=weights[i]) for i in used]
        lora_a = [a for i in used for a in ctx.lora_a[i * each : (i + 1) * each]]
        into = Into()
        if ctx.accumulates and all(needs[5:]):
            found = _existing(lora_a, [b for layer in layers for b in layer.lora_b])
            if found is not None:
                into = Into(found[0], [found[1][i : i + each] for i in range(0, len(lora_a), each)])
        batch = ctx.batch
        if len(used) < len(dys):
            s = s[used]
            batch = replace(batch, layers=None if batch.layers is None else batch.layers[used])
        rows = [dense_rows(dy) for dy in dys if dy is not None]
        with torch._C._AutoDispatchBelowAutograd():
            dx, da, db = gpu_operator(ctx.backend).backward(rows, x, layers, lora_a, s, batch, wanted, into)
        result: list[Tensor | None] = [dx if wanted[0] else None, *nothing[1:]]
        for place, i in enumerate(used):
            a, b = 5 + i * each, 5 + n + i * each
            if da:
                result[a : a + each] = da[place * each : (place + 1) * each]
            if db[place]:
                result[b : b + each] = db[place]
        return tuple(result)


def _versions(*tensors: Tensor | None) -> list[int]:
    try:
        return [0 if tensor is None else tensor._version for tensor in tensors]
    except RuntimeError:  # one was made in inference mode; it counts no versions and needs no gradient
        return [0 if t is None or t.is_inference() else t._version for t in tensors]


def _changed(ctx: Any) -> str:
    """Names the first tensor that is not what it was in the forward pass."""
    n = len(ctx.lora_a)
    names = [f"lora_a[{i}]" for i in range(n)] + [f"lora_b[{i}]" for i in range(n)] + [*PLAN]
    now = _versions(*ctx.lora_a, *ctx.lora_b, *ctx.plan)
    name = next(name for name, new, old in zip(names, now, ctx.versions, strict=True) if new != old)
    return _CHANGED.format(name)


def _existing(lora_a: Sequence[Tensor], lora_b: Sequence[Tensor]) -> Gradients | None:
    """The gradients of all adapters, if all are fp32, have one of plain memory, and nobody listens to any.

    fp32, since adding before rounding differs from adding after it, and whether an adapter's gradient is
    added here depends on its batch-mates.
    """
    found = []
    for parameter in (*lora_a, *lora_b):
        grad = parameter.grad if parameter.is_leaf and parameter.dtype is torch.float32 else None
        if grad is None or grad.dtype != torch.float32 or grad.is_sparse:
            return None
        if not (grad.is_contiguous() or grad.t().is_contiguous()):
            return None
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return None
        found.append(grad)
    torch.autograd.graph.increment_version(found)
    return found[: len(lora_a)], found[len(lora_a) :]
