"""The compiled operators as PyTorch knows them: loading, fake kernels and the one autograd formula.

Schemas stand in csrc/ops.cpp, argument by argument in docs/design.md. The formula is used twice: by
`torch.autograd.Function` in eager mode, which costs a few microseconds, and by `torch.library` for
`torch.compile` and `opcheck`, whose generated function costs some ten times that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
) -> Tensor:
    """`y` of `mlora_ext::lora_linear`, differentiable once in `x`, `lora_a` and `lora_b`."""
    check_library()
    if torch.compiler.is_compiling():
        y, _ = torch.ops.mlora_ext.lora_linear(
            x, weight, bias, lora_a, lora_b, segments, scaling, dropout_p, dropout_rng, layer
        )
        return y
    plan = (segments, scaling, dropout_p, dropout_rng, layer)
    return _LoRALinear.apply(x, weight, bias, plan, len(lora_a), *lora_a, *lora_b)


class _LoRALinear(torch.autograd.Function):
    """Eager mode. Tensor lists are spread over the arguments, as `Function` asks.

    Adapters and plan are kept beside the saved tensors with a version check of their own: a saved tensor
    costs more than a microsecond, and a layer has dozens of them.
    """

    @staticmethod
    def forward(ctx: Any, x, weight, bias, plan, n, *adapters):  # type: ignore[no-untyped-def]
        lora_a, lora_b = adapters[:n], adapters[n:]
        with torch._C._AutoDispatchBelowAutograd():
            y, s = torch.ops.mlora_ext.lora_linear.default(x, weight, bias, lora_a, lora_b, *plan)
        if True in ctx.needs_input_grad:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x, weight, s)
            ctx.lora_a, ctx.lora_b, ctx.plan = lora_a, lora_b, plan
            ctx.versions = [tensor._version for tensor in adapters]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None):  # type: ignore[no-untyped-def]
        needs = ctx.needs_input_grad
        if dy is None:
            return (None,) * len(needs)
        lora_a, lora_b = ctx.lora_a, ctx.lora_b
        n = len(lora_a)
        if [tensor._version for tensor in (*lora_a, *lora_b)] != ctx.versions:
            raise RuntimeError("adapter modified in place")
        x, weight, s = ctx.saved_tensors
        if dy.stride(-1) != 1:
            dy = dy.contiguous()
        da, db = True in needs[5 : 5 + n], True in needs[5 + n :]
        grad_x, grad_a, grad_b = torch.ops.mlora_ext.lora_linear_backward.default(
            dy, x, weight, lora_a, lora_b, s, *ctx.plan, needs[0], da, db
        )
        none = (None,) * n
        return (
            grad_x if needs[0] else None,
            None,
            None,
            None,
            None,
            *(grad_a if da else none),
            *(grad_b if db else none),
        )


def _library_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, lora_a, lora_b, *rest = inputs
    ctx.mark_non_differentiable(output[1])
    _save(ctx, x, weight, lora_a, lora_b, output[1], tuple(rest))


def _library_backward(ctx: Any, dy: Tensor | None, _: Tensor | None):  # type: ignore[no-untyped-def]
    n = ctx.num_adapters
    if dy is None:
        return (None, None, None, [None] * n, [None] * n, None, None, None, None, None)
    needs = ctx.needs_input_grad
    dx, da, db = _gradients(ctx, dy, needs[0], any(needs[3]), any(needs[4]))
    return (dx, None, None, da[:n], db[:n], None, None, None, None, None)


def _save(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    s: Tensor,
    plan: tuple[Tensor | None, ...],
) -> None:
    """Keep x itself, s, and what dropout masks are drawn from; never a copy or a mask."""
    ctx.num_adapters = len(lora_a)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, s, *plan, *lora_a, *lora_b)


def _gradients(
    ctx: Any, dy: Tensor, need_dx: bool, need_da: bool, need_db: bool
) -> tuple[Tensor | None, Sequence[Tensor | None], Sequence[Tensor | None]]:
    """The autograd formula: `lora_linear_backward` on what `_save` kept."""
    x, weight, s, segments, scaling, p, rng, layer, *adapters = ctx.saved_tensors
    n = ctx.num_adapters
    if dy.stride(-1) != 1:
        dy = dy.contiguous()
    dx, da, db = torch.ops.mlora_ext.lora_linear_backward.default(
        dy,
        x,
        weight,
        adapters[:n],
        adapters[n:],
        s,
        segments,
        scaling,
        p,
        rng,
        layer,
        need_dx,
        need_da,
        need_db,
    )
    none: Sequence[None] = (None,) * n
    return dx if need_dx else None, da if need_da else none, db if need_db else none


def _fake_forward(  # type: ignore[no-untyped-def]
    x, weight, bias, lora_a, lora_b, segments, scaling, dropout_p, dropout_rng, layer
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
):
    dx = x.new_empty(x.shape) if need_dx else x.new_empty(0)
    da = [_fake_gradient(a) for a in lora_a] if need_da else []
    db = [_fake_gradient(b) for b in lora_b] if need_db else []
    return dx, da, db


def _fake_gradient(parameter: Tensor) -> Tensor:
    rows, cols = parameter.shape
    strides = (1, rows) if parameter.stride() == (1, rows) else (cols, 1)
    return parameter.new_empty_strided((rows, cols), strides)


def _fake_base_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _fake_base_linear_dx(dy: Tensor, weight: Tensor) -> Tensor:
    return dy.new_empty(dy.shape[0], weight.shape[1])


def _load_library() -> bool:
    """Load the compiled operators and register what Python adds to them; False if there are none."""
    if not LIBRARY.exists():
        return False
    torch.ops.load_library(str(LIBRARY))
    torch.library.register_fake("mlora_ext::lora_linear", _fake_forward)
    torch.library.register_fake("mlora_ext::lora_linear_backward", _fake_backward)
    torch.library.register_fake("mlora_ext::base_linear", _fake_base_linear)
    torch.library.register_fake("mlora_ext::base_linear_dx", _fake_base_linear_dx)
    torch.library.register_autograd("mlora_ext::lora_linear", _library_backward, setup_context=_library_setup)
    return True


LOADED = _load_library()
