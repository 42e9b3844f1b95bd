"""The compiled operators as PyTorch knows them: loading, fake kernels and the one autograd formula.

Schemas stand in csrc/ops.cpp, argument by argument in docs/design.md. The formula is used twice: by
`torch.autograd.Function` in eager mode, which costs a few microseconds, and by `torch.library` for
`torch.compile` and `opcheck`, whose generated function costs some ten times that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .backend import Backend, backend_for, gpu_operator
from .gpu.operator import Batch, GpuOperator, Layer

if TYPE_CHECKING:
    from .functional import LayerOperands

_PLAN = ("segments", "scaling", "dropout_p", "dropout_rng", "layer")
_Plan = tuple[Tensor | None, ...]
Packed = tuple[Tensor | None, Tensor | None]
NOT_PACKED: Packed = (None, None)

_CHANGED = (
    "{}: modified by an in-place operation between forward and backward, as by an optimizer step; run the "
    "backward pass first"
)
LIBRARY = Path(__file__).parent / "libmlora_ops.so"


def check_library() -> None:
    """Refuse to go on without the compiled operators.

    Raises:
        RuntimeError: if the library has not been built; says how to build it.
    """
    if not LOADED:
        raise RuntimeError(
            f"the compiled operators are missing ({LIBRARY.name} is not in {LIBRARY.parent}). Build them "
            "with `pip install --no-build-isolation .` or `make build` in the source folder, or use the slow "
            "plain PyTorch implementation: mlora_ext.use_backend('reference')"
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
) -> Tensor:
    """`y` of `mlora_ext::lora_linear`, differentiable once in `x`, `lora_a` and `lora_b`.

    `packed` holds the weight for the forward and for the backward product; a compiled graph goes without.
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
    return _LoRALinear.apply(x, weight, bias, plan, packed, backend, len(lora_a), *lora_a, *lora_b)


def forward(
    backend: Backend,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    plan: _Plan,
    packed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`(y, s)` by one compiled backend, below autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        if backend == "cpu":
            return torch.ops.mlora_ext.lora_linear.default(x, weight, bias, lora_a, lora_b, *plan, packed)  # type: ignore[no-any-return]
        return _gpu_forward(gpu_operator(backend), x, weight, bias, lora_a, lora_b, plan)  # type: ignore[arg-type]


def backward(
    backend: Backend | None,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    s: Tensor,
    plan: _Plan,
    wanted: tuple[bool, bool, bool] = (True, True, True),
    packed: Tensor | None = None,
) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
    """`(dx, da, db)` by one compiled backend, or with None by that of x's device, as in a traced graph."""
    if backend is None or backend == "cpu":
        return torch.ops.mlora_ext.lora_linear_backward.default(  # type: ignore[no-any-return]
            dy, x, weight, lora_a, lora_b, s, *plan, *wanted, packed
        )
    with torch._C._AutoDispatchBelowAutograd():
        operator = gpu_operator(backend)  # type: ignore[arg-type]
        return _gpu_backward(operator, dy, x, weight, lora_a, lora_b, s, plan, wanted)


class _LoRALinear(torch.autograd.Function):
    """Eager mode. Tensor lists are spread over the arguments, as `Function` asks.

    Saved are x itself, the weight and s; never a copy or a mask. Adapters and plan are kept beside them, with
    a version check of our own, so that hooks on saved tensors see only what is worth moving.
    """

    @staticmethod
    def forward(ctx: Any, x, weight, bias, plan, packed, backend, n, *adapters):  # type: ignore[no-untyped-def]
        lora_a, lora_b = adapters[:n], adapters[n:]
        y, s = forward(backend, x, weight, bias, lora_a, lora_b, plan, packed[0])
        if True in ctx.needs_input_grad:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x, weight, s)
            ctx.lora_a, ctx.lora_b, ctx.plan, ctx.packed = lora_a, lora_b, plan, packed[1]
            ctx.backend = backend
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
        wanted = needs[0], True in needs[7 : 7 + n], True in needs[7 + n :]
        dx, da, db = _gradients(
            ctx.backend, dy, x, weight, ctx.lora_a, ctx.lora_b, s, ctx.plan, ctx.packed, wanted
        )
        return (dx, None, None, None, None, None, None, *da, *db)


def lora_linear_siblings(
    x: Tensor, operands: Sequence[LayerOperands], plan: _Plan, backend: Backend
) -> Sequence[Tensor]:
    """`y` of several layers that share x, adapters and plan, differentiable once in x and the adapters."""
    adapters = [a for layer in operands for a in layer.lora_a] + [
        b for layer in operands for b in layer.lora_b
    ]
    return _LoRASiblings.apply(x, operands, plan, backend, *adapters)  # type: ignore[no-any-return]


class _LoRASiblings(torch.autograd.Function):
    """As `_LoRALinear`, for several layers; theirs is one node of the graph."""

    @staticmethod
    def forward(ctx: Any, x, operands, plan, backend, *adapters):  # type: ignore[no-untyped-def]
        layers = [Layer(layer.weight, layer.bias, layer.lora_b) for layer in operands]
        lora_a, batch = adapters[: len(adapters) // 2], Batch(*plan)
        with torch._C._AutoDispatchBelowAutograd():
            ys, s = gpu_operator(backend).forward(x, layers, lora_a, batch)
        if True in ctx.needs_input_grad:
            ctx.save_for_backward(x, s, *(layer.weight for layer in layers))
            ctx.layers, ctx.lora_a, ctx.batch, ctx.backend = layers, lora_a, batch, backend
            ctx.adapters, ctx.plan = adapters, plan
            ctx.versions = _versions(*adapters, *plan)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor):  # type: ignore[no-untyped-def]
        needs, n = ctx.needs_input_grad, len(ctx.lora_a)
        if _versions(*ctx.adapters, *ctx.plan) != ctx.versions:
            raise RuntimeError(_CHANGED.format("an adapter, or the plan"))
        x, s, *weights = ctx.saved_tensors
        layers = [replace(layer, weight=weight) for layer, weight in zip(ctx.layers, weights, strict=True)]
        wanted = needs[0], True in needs[4 : 4 + n], True in needs[4 + n :]
        rows = [dy if dy.stride(-1) == 1 else dy.contiguous() for dy in dys]
        with torch._C._AutoDispatchBelowAutograd():
            dx, da, db = gpu_operator(ctx.backend).backward(rows, x, layers, ctx.lora_a, s, ctx.batch, wanted)
        none = [None] * n
        das = da if wanted[1] else none
        dbs = [gradient for gradients in db for gradient in gradients] if wanted[2] else none
        return (dx if wanted[0] else None, None, None, None, *das, *dbs)


def _versions(*tensors: Tensor | None) -> list[int]:
    try:
        return [0 if tensor is None else tensor._version for tensor in tensors]
    except RuntimeError:  # one was made in inference mode; it counts no versions and needs no gradient
        return [0 if t is None or t.is_inference() else t._version for t in tensors]


def _changed(ctx: Any) -> str:
    """Names the first tensor that is not what it was in the forward pass."""
    n = len(ctx.lora_a)
    names = [f"lora_a[{i}]" for i in range(n)] + [f"lora_b[{i}]" for i in range(n)] + [*_PLAN]
    now = _versions(*ctx.lora_a, *ctx.lora_b, *ctx.plan)
    name = next(name for name, new, old in zip(names, now, ctx.versions, strict=True) if new != old)
    return _CHANGED.format(name)


def _library_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, lora_a, lora_b, *plan, _ = inputs
    ctx.num_adapters = len(lora_a)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1], *plan, *lora_a, *lora_b)


def _library_backward(ctx: Any, dy: Tensor | None, _: Tensor | None):  # type: ignore[no-untyped-def]
    n = ctx.num_adapters
    rest = (None,) * (len(_PLAN) + 1)  # and for `packed`
    if dy is None:
        return (None, None, None, [None] * n, [None] * n, *rest)
    x, weight, s, *plan = ctx.saved_tensors[:8]
    lora_a, lora_b = ctx.saved_tensors[8 : 8 + n], ctx.saved_tensors[8 + n :]
    needs = ctx.needs_input_grad
    wanted = needs[0], any(needs[3]), any(needs[4])
    dx, da, db = _gradients(None, dy, x, weight, lora_a, lora_b, s, tuple(plan), None, wanted)
    return (dx, None, None, list(da), list(db), *rest)


def _gradients(
    backend: Backend | None,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    s: Tensor,
    plan: _Plan,
    packed: Tensor | None,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Sequence[Tensor | None], Sequence[Tensor | None]]:
    """The autograd formula: dx, and dA and dB of every adapter, as far as they are wanted."""
    if dy.stride(-1) != 1:
        dy = dy.contiguous()
    dx, da, db = backward(backend, dy, x, weight, lora_a, lora_b, s, plan, wanted, packed)
    none: Sequence[None] = (None,) * len(lora_a)
    return dx if wanted[0] else None, da if wanted[1] else none, db if wanted[2] else none


def _fake_forward(  # type: ignore[no-untyped-def]
    x, weight, bias, lora_a, lora_b, segments, scaling, dropout_p, dropout_rng, layer, packed
):
    rank = max((a.shape[0] for a in lora_a), default=0)
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], rank)


def _fake_backward(  # type: ignore[no-untyped-def]
    dy,
    x,
    weight,
    lora_a,
    lora_b,
    s,
    segments,
    scaling,
    dropout_p,
    dropout_rng,
    layer,
    need_dx,
    need_da,
    need_db,
    packed,
):
    dx = x.new_empty(x.shape) if need_dx else x.new_empty(0)
    da = [_fake_gradient(a) for a in lora_a] if need_da else []
    db = [_fake_gradient(b) for b in lora_b] if need_db else []
    return dx, da, db


def _fake_gradient(parameter: Tensor) -> Tensor:
    rows, cols = parameter.shape
    strides = (1, rows) if parameter.stride() == (1, rows) else (cols, 1)
    return parameter.new_empty_strided((rows, cols), strides)


def _fake_base_linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _fake_base_linear_dx(dy: Tensor, weight: Tensor, packed: Tensor | None) -> Tensor:
    return dy.new_empty(dy.shape[0], weight.shape[1])


def _gpu_forward(
    operator: GpuOperator,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    plan: _Plan,
) -> tuple[Tensor, Tensor]:
    (y,), s = operator.forward(x, [Layer(weight, bias, lora_b)], lora_a, Batch(*plan))  # type: ignore[arg-type]
    return y, s[0]


def _gpu_backward(
    operator: GpuOperator,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    s: Tensor,
    plan: _Plan,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    layer, batch = Layer(weight, None, lora_b), Batch(*plan)  # type: ignore[arg-type]
    dx, da, (db,) = operator.backward([dy], x, [layer], lora_a, s.unsqueeze(0), batch, wanted)
    return dx, da, db


def _cuda_forward(x, weight, bias, lora_a, lora_b, *rest):  # type: ignore[no-untyped-def]
    """The operator's kernel for CUDA tensors, as a compiled graph calls it."""
    return _gpu_forward(_of_device(x), x, weight, bias, lora_a, lora_b, rest[: len(_PLAN)])


def _cuda_backward(dy, x, weight, lora_a, lora_b, s, *rest):  # type: ignore[no-untyped-def]
    plan, wanted = rest[: len(_PLAN)], rest[len(_PLAN) : -1]
    return _gpu_backward(_of_device(x), dy, x, weight, lora_a, lora_b, s, plan, wanted)


def _of_device(x: Tensor) -> GpuOperator:
    return gpu_operator(backend_for(x.device, x.dtype))  # type: ignore[arg-type]


def _load_library() -> bool:
    """Load the compiled operators and register what Python adds to them; False if there are none."""
    if not LIBRARY.exists():
        return False
    torch.ops.load_library(str(LIBRARY))
    torch.library.register_fake("mlora_ext::lora_linear", _fake_forward)
    torch.library.register_fake("mlora_ext::lora_linear_backward", _fake_backward)
    torch.library.register_fake("mlora_ext::base_linear", _fake_base_linear)
    torch.library.register_fake("mlora_ext::base_linear_dx", _fake_base_linear_dx)
    torch.library.register_kernel("mlora_ext::lora_linear", "cuda", _cuda_forward)
    torch.library.register_kernel("mlora_ext::lora_linear_backward", "cuda", _cuda_backward)
    torch.library.register_autograd("mlora_ext::lora_linear", _library_backward, setup_context=_library_setup)
    return True


LOADED = _load_library()
