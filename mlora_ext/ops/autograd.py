"""The operator in eager mode, with its one autograd formula (mLoRA, Eq. 2-4; docs/design.md).

Our own autograd function costs a few microseconds a call; the function that `torch.library` generates costs
about ten times that. Backward saves x itself, a plain weight and s, and never a copy or a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from ..backends import run
from ..backends.interface import PLAN, Layer, PlanTensors
from ..backends.selection import Backend, backend_for
from ..frozen.base_gemm import dense_rows
from ..frozen.weight import FrozenWeight, FusedOperands
from ..library import check_library
from ..once_differentiable import once_differentiable
from . import registration  # noqa: F401 - tells torch.library of the operators
from .held import HeldAdapters, UpdateCounts, anchor

_CHANGED = (
    "{}: was changed in place between forward and backward, for example by an optimizer step; run backward "
    "before you change it"
)
_NO_OPERANDS = (None, None, None)


class Call(NamedTuple):
    """What a call needs beside x and matrices.

    Attributes:
        frozen: W `[d_out, d_in]` of each layer.
        biases: `[d_out]` or None, of each layer.
        plan: the tensors of `backends.interface.PLAN`; `layer` is `[L]` for several layers.
        backend: which computes; several layers need one for GPUs.
        held: adapters that keep their gradients; None: the matrices are given.
        updates: counts updates of held adapters in place.
    """

    frozen: Sequence[FrozenWeight]
    biases: Sequence[Tensor | None]
    plan: PlanTensors
    backend: Backend
    held: HeldAdapters | None = None
    updates: UpdateCounts | None = None


def lora_linear(
    x: Tensor,
    frozen: Sequence[FrozenWeight],
    biases: Sequence[Tensor | None],
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    plan: PlanTensors,
    backend: Backend = "cpu",
) -> Sequence[Tensor]:
    """Returns `y [T, O]` of each layer, differentiable once in `x`, `lora_a` and `lora_b`.

    Args:
        x: `[T, d_in]`, dense rows, in a dtype that the backend serves.
        frozen: as in `Call`, and so on.
        biases: frozen.
        lora_a: A `[r_i, d_in]` of all adapters of the first layer, then of the second; dtype of x or fp32.
        lora_b: B `[d_out, r_i]`, likewise.
        plan: the same adapters' on all layers.
        backend: not `reference`.
    """
    check_library()
    if torch.compiler.is_compiling():
        (one,), (bias,) = frozen, biases
        y, _ = torch.ops.mlora_ext.lora_linear(x, one.dense(), bias, lora_a, lora_b, *plan, None)
        return (y,)
    if not torch.is_grad_enabled():
        layers = [_layer(one, one.fused(x), bias) for one, bias in zip(frozen, biases, strict=True)]
        return run.forward(backend, x, layers, lora_a, lora_b, plan)[0]
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "torch.func: the compiled operator does not support its transforms; use "
            "mlora_ext.use_backend('reference')"
        )
    call = Call(frozen, biases, plan, backend)
    return _LoRALinear.apply(x, None, call, *lora_a, *lora_b)  # type: ignore[attr-defined, no-any-return]


def lora_linear_held(
    x: Tensor,
    frozen: Sequence[FrozenWeight],
    biases: Sequence[Tensor | None],
    adapters: HeldAdapters,
    plan: PlanTensors,
    updates: UpdateCounts,
) -> Sequence[Tensor] | None:
    """Returns `y [..., O]` of each layer; backward adds to the gradients of adapters that keep them.

    None where this does not serve: under autocast, with the backend `reference`, and inside `torch.func`.
    """
    if torch.is_autocast_enabled(x.device.type) or torch._C._are_functorch_transforms_active():
        return None
    backend = backend_for(x.device, x.dtype)
    if backend == "reference":
        return None
    x_TD = dense_rows(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))
    call = Call(frozen, biases, plan, backend, adapters, updates)
    ys = _LoRALinear.apply(x_TD, anchor(), call)  # type: ignore[attr-defined]
    if x.dim() == 2:
        return ys  # type: ignore[no-any-return]
    lead, shaped = x.shape[:-1], []
    for y in ys:
        shaped.append(y.view(*lead, y.shape[-1]))
    return shaped


def _layer(frozen: FrozenWeight, operands: FusedOperands | None, bias: Tensor | None) -> Layer:
    weight, packed, _ = operands or _NO_OPERANDS
    return Layer(frozen, weight, bias, packed)


class _LoRALinear(_SingleLevelFunction):
    """One layer, or several that share x, as one node of the graph.

    Matrices that are given are spread over the arguments, as autograd asks. Adapters that keep their
    gradients are no arguments: an anchor makes the node. Matrices and plan are kept outside of the saved
    tensors, with our own version check, so hooks on saved tensors see only those that are worth moving: x,
    the weights and what the backend saves. Both kinds save the same, since a checkpoint may recompute a layer
    by the other way.

    `_SingleLevelFunction` is the private base class of `Function` in torch 2.11 to 2.13: `Function` adds
    support of `torch.func`, which takes 2 µs a call. Loops stand here in place of comprehensions, each of
    which is a call in Python 3.11.
    """

    @staticmethod
    def forward(ctx: Any, x, _, call, *matrices):  # type: ignore[no-untyped-def]
        frozen, biases, plan, backend, held, updates = call
        layers, weights, packed_dx = [], [], []
        for one, bias in zip(frozen, biases, strict=True):
            weight, packed, packed_back = one.fused(x) or _NO_OPERANDS
            layers.append(Layer(one, weight, bias, packed))
            weights.append(weight)
            packed_dx.append(packed_back)
        n = len(matrices) // 2
        a, b = (matrices[:n], matrices[n:]) if held is None else held.tables
        ys, saved = run.forward(backend, x, layers, a, b, plan)
        if True in ctx.needs_input_grad:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x, *weights, *saved)
            ctx.call, ctx.packed_dx, ctx.matrices = call, packed_dx, matrices
            ctx.since = versions_of(*matrices, *plan) if held is None else updates.count
        return tuple(ys)

    @staticmethod
    @once_differentiable(lambda ctx: (ctx.saved_tensors[0], *ctx.matrices))
    def backward(ctx: Any, *dys: Tensor | None):  # type: ignore[no-untyped-def]
        frozen, _, plan, backend, held, updates = ctx.call
        needs, matrices, n = ctx.needs_input_grad, ctx.matrices, len(ctx.matrices) // 2
        used, rows = [], []
        for i, dy in enumerate(dys):
            if dy is not None:
                used.append(i)
                rows.append(dense_rows(dy))
        if not used:
            return (None,) * len(needs)
        x, *rest = ctx.saved_tensors
        weights, saved = rest[: len(dys)], tuple(rest[len(dys) :])
        layers = []
        for i in used:
            layers.append(Layer(frozen[i], weights[i], None, ctx.packed_dx[i]))
        if held is None:
            if versions_of(*matrices, *plan) != ctx.since:
                raise RuntimeError(_changed(ctx))
            a, b = matrices[:n], matrices[n:]
            wanted = needs[0], True in needs[3 : 3 + n], True in needs[3 + n :]
            if len(used) < len(dys):
                a, b, saved, plan = _of_layers(used, len(dys), x, a, b, saved, plan)
        else:
            executes = torch._C._will_engine_execute_node(ctx.next_functions[1][0])  # the anchor's
            if updates.count != ctx.since or not executes:
                _refuse_held(ctx)
            (a, b), wanted = held.tables, (needs[0], True, True)
            for i in used:
                held.written[i].update(held.names)
            if len(used) < len(dys):  # the tables are those of all layers
                rows, layers = _with_zeros(ctx, x, dys, weights)
        dx, da, db = run.backward(backend, rows, x, layers, a, b, saved, plan, wanted)
        if held is not None:
            return dx if wanted[0] else None, None, None
        if len(used) < len(dys):
            da, db = _spread(da, used, len(dys), n), _spread(db, used, len(dys), n)
        none: Sequence[None] = (None,) * n
        return (dx if wanted[0] else None, None, None, *(da or none), *(db or none))


def _refuse_held(ctx: Any) -> None:
    """Raises RuntimeError if backward may not add to the gradients that these adapters keep."""
    held, updates = ctx.call[4:]
    updates.refuse(held.names, ctx.since)
    if not torch._C._will_engine_execute_node(ctx.next_functions[1][0]):
        raise RuntimeError(
            "adapters keep their gradients, and this backward pass is of some inputs only; call "
            "Tensor.backward without inputs=, and torch.autograd.grad before the gradients are held"
        )


def _with_zeros(
    ctx: Any, x: Tensor, dys: Sequence[Tensor | None], weights: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Layer]]:
    """Returns rows of dy and layers where some outputs have not been used: their dy is zero."""
    frozen = ctx.call.frozen
    rows = [
        x.new_zeros(len(x), one.shape[0]) if dy is None else dense_rows(dy)
        for dy, one in zip(dys, frozen, strict=True)
    ]
    return rows, list(map(Layer, frozen, weights))


def _of_layers(
    used: Sequence[int],
    count: int,
    x: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    saved: Sequence[Tensor],
    plan: PlanTensors,
) -> tuple[list[Tensor], list[Tensor], tuple[Tensor, ...], PlanTensors]:
    """Returns matrices, saved tensors and plan of some of `count` layers: the others' y has not been used."""
    each = len(a) // count
    a, b = ([m for i in used for m in every[i * each : (i + 1) * each]] for every in (a, b))
    s, *masks = (torch.stack([one[i] for i in used]) for one in saved)
    widest = max(one.shape[0] for one in a)  # rows of s are as wide as these layers' largest rank
    padded = -(-widest // 8) * 8 if x.element_size() == 2 else widest
    layers = None if plan[-1] is None else torch.stack([plan[-1][i] for i in used])
    return a, b, (s[..., :padded].contiguous(), *masks), (*plan[:-1], layers)


def _spread(found: Sequence[Tensor], used: Sequence[int], count: int, n: int) -> list[Any]:
    """Returns the gradients of some layers' matrices at the places of these among all n."""
    every: list[Any] = [None] * n
    each = n // count
    for place, i in enumerate(used if found else ()):
        every[i * each : (i + 1) * each] = found[place * each : (place + 1) * each]
    return every


def versions_of(*tensors: Tensor | None) -> list[int]:
    """Returns how often each tensor has been changed in place; 0 for one that counts nothing."""
    try:
        return [0 if tensor is None else tensor._version for tensor in tensors]
    except RuntimeError:  # a tensor made in inference mode counts no versions; it needs no gradient
        return [0 if t is None or t.is_inference() else t._version for t in tensors]


def _changed(ctx: Any) -> str:
    """Returns the message that names the first tensor changed since the forward pass."""
    if len(ctx.call.frozen) > 1:
        return _CHANGED.format(f"an adapter of {len(ctx.call.frozen)} layers that share x, or their plan")
    n = len(ctx.matrices) // 2
    names = [f"lora_a[{i}]" for i in range(n)] + [f"lora_b[{i}]" for i in range(n)] + [*PLAN]
    now = versions_of(*ctx.matrices, *ctx.call.plan)
    name = next(name for name, new, old in zip(names, now, ctx.since, strict=True) if new != old)
    return _CHANGED.format(name)
