"""Registers with `torch.library` what compiled graphs and opcheck need of the operators.

These are fake kernels, which tell shapes and strides without numbers, kernels for CUDA tensors, and the
autograd formula. The schemas are in csrc/ops.cpp, their arguments in docs/design.md. Eager mode uses
`mlora_ext.ops.autograd`, with the same formula.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..backends import run
from ..backends.factors import refuse_meta
from ..backends.interface import PLAN, Layer
from ..backends.selection import Backend, backend_for
from ..frozen.base_gemm import dense_rows
from ..frozen.plain import PlainWeight
from ..library import LOADED


def lora_linear(  # type: ignore[no-untyped-def]
    x, weight, bias, lora_a, lora_b, segments, scaling, dropout_p, dropout_rng, layer, packed
):
    """Returns empty y [rows, d_out] and s [rows, largest rank]."""
    return x.new_empty(x.shape[0], weight.shape[0]), _intermediate(x, lora_a)


def lora_linear_backward(  # type: ignore[no-untyped-def]
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
    """Returns empty dx, or one without elements, and gradients like the matrices, where wanted."""
    dx = x.new_empty(x.shape) if need_dx else x.new_empty(0)
    return dx, *_gradients(lora_a, lora_b, need_da, need_db)


def lora_add(  # type: ignore[no-untyped-def]
    x, y, lora_a, lora_b, segments, scaling, dropout_p, dropout_rng, layer
):
    """Returns an empty s [rows, largest rank]; y is written to in place."""
    return _intermediate(x, lora_a)


def lora_add_backward(  # type: ignore[no-untyped-def]
    dy, x, dx, lora_a, lora_b, s, segments, scaling, dropout_p, dropout_rng, layer, need_da, need_db
):
    """Returns empty gradients like the matrices, where wanted; dx is written to in place."""
    return _gradients(lora_a, lora_b, need_da, need_db)


def dropout_mask(  # type: ignore[no-untyped-def]
    segments, dropout_p, dropout_rng, layer, rows, columns
):
    """Returns an empty mask [rows, columns]."""
    return segments.new_empty(rows, columns, dtype=torch.bool)


def base_linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    """Returns an empty y [rows, d_out]."""
    return x.new_empty(x.shape[0], weight.shape[0])


def base_linear_dx(dy: Tensor, weight: Tensor, packed: Tensor | None) -> Tensor:
    """Returns an empty dx [rows, d_in]."""
    return dy.new_empty(dy.shape[0], weight.shape[1])


def gradient_of(parameter: Tensor) -> Tensor:
    """Returns an empty gradient with the Parameter's strides if it is dense, else with dense rows."""
    rows, cols = parameter.shape
    strides = (1, rows) if parameter.stride() == (1, rows) else (cols, 1)
    return parameter.new_empty_strided((rows, cols), strides)


def _intermediate(x, lora_a) -> Tensor:  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], max((a.shape[0] for a in lora_a), default=0))


def _gradients(lora_a, lora_b, need_da, need_db):  # type: ignore[no-untyped-def]
    da = [gradient_of(a) for a in lora_a] if need_da else []
    return da, [gradient_of(b) for b in lora_b] if need_db else []


_FAKE = (
    lora_linear,
    lora_linear_backward,
    lora_add,
    lora_add_backward,
    base_linear,
    base_linear_dx,
    dropout_mask,
)


def _cuda_forward(x, weight, bias, lora_a, lora_b, *rest):  # type: ignore[no-untyped-def]
    layer, plan = Layer(PlainWeight.of(weight), weight, bias), rest[: len(PLAN)]
    (y,), saved = run.forward(_of_device(x), x, [layer], lora_a, lora_b, plan, masks=False)
    s = saved[0][0]
    widest = max((len(a) for a in lora_a), default=0)
    return y, s if s.shape[1] == widest else s[:, :widest].contiguous()  # `cuda` pads rows of s


def _cuda_backward(dy, x, weight, lora_a, lora_b, s, *rest):  # type: ignore[no-untyped-def]
    plan, wanted = rest[: len(PLAN)], rest[len(PLAN) : -1]
    backend, layer = _of_device(x), Layer(PlainWeight.of(weight), weight)
    if backend == "cuda" and x.element_size() == 2:
        s = torch.nn.functional.pad(s, (0, -s.shape[1] % 8))
    dx, da, db = run.backward(backend, [dy], x, [layer], lora_a, lora_b, (s.unsqueeze(0),), plan, wanted)
    return x.new_empty(0) if dx is None else dx, da, db


def _of_device(x: Tensor) -> Backend:
    return backend_for(x.device, x.dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, lora_a, lora_b, *plan, _ = inputs
    ctx.num_adapters = len(lora_a)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1], *plan, *lora_a, *lora_b)


def _backward(ctx: Any, dy: Tensor | None, _: Tensor | None):  # type: ignore[no-untyped-def]
    n = ctx.num_adapters
    rest = (None,) * (len(PLAN) + 1)  # and for `packed`
    if dy is None:
        return (None, None, None, [None] * n, [None] * n, *rest)
    x, weight, s, *plan = ctx.saved_tensors[:8]
    lora_a, lora_b = ctx.saved_tensors[8 : 8 + n], ctx.saved_tensors[8 + n :]
    needs = ctx.needs_input_grad
    wanted = needs[0], any(needs[3]), any(needs[4])
    dx, da, db = torch.ops.mlora_ext.lora_linear_backward.default(
        dense_rows(dy), x, weight, lora_a, lora_b, s, *plan, *wanted, None
    )
    none = [None] * n
    return (dx if wanted[0] else None, None, None, list(da) or none, list(db) or none, *rest)


def _without_real_tensors(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a fake kernel that refuses real tensors; one operand on the meta device leads to it."""

    @wraps(kernel)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = [one for arg in (*args, *kwargs.values()) for one in (arg if type(arg) is list else [arg])]
        refuse_meta(not one.is_meta for one in given if isinstance(one, Tensor))
        return kernel(*args, **kwargs)

    return checked


def register() -> None:
    """Registers everything; called once, when `mlora_ext` is imported."""
    for kernel in _FAKE:
        torch.library.register_fake(f"mlora_ext::{kernel.__name__}", _without_real_tensors(kernel))
    torch.library.register_kernel("mlora_ext::lora_linear", "cuda", _cuda_forward)
    torch.library.register_kernel("mlora_ext::lora_linear_backward", "cuda", _cuda_backward)
    torch.library.register_autograd("mlora_ext::lora_linear", _backward, setup_context=_setup)


if LOADED:
    register()
