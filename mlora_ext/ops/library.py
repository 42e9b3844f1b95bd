"""The compiled operators as PyTorch knows them: loading, fake kernels and the one autograd formula.

Schemas stand in csrc/ops.cpp, argument by argument in docs/design.md. The formula is used twice: by eager
mode (`eager.py`), and by `torch.library` for `torch.compile` and `opcheck`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..backends.gpu.operator import Batch, GpuOperator, Into, Layer, one_dtype
from ..backends.selection import Backend, backend_for, gpu_operator

PLAN = ("segments", "scaling", "dropout_p", "dropout_rng", "layer")
PlanTensors = tuple[Tensor | None, ...]
Packed = tuple[Tensor | None, Tensor | None]
Gradients = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Of lora_a and of lora_b."""
NOT_PACKED: Packed = (None, None)

LIBRARY = Path(__file__).parents[1] / "libmlora_ops.so"


def check_library() -> None:
    """Refuse to go on without the compiled operators.

    Raises:
        RuntimeError: if the library has not been built; says how to build it.
    """
    if not LOADED:
        raise RuntimeError(
            f"the compiled operators are missing ({LIBRARY.name} is not in {LIBRARY.parent}). Build them "
            "with `pip install --no-build-isolation .` or `make env` in the source folder, or use the slow "
            "plain PyTorch implementation: mlora_ext.use_backend('reference')"
        )


def dense_rows(rows: Tensor) -> Tensor:
    """Returns `rows`, copied where there are gaps between elements or, on a CPU, between 16-bit rows.

    Products of 16 bits pad their tiles. On processors with AMX, PyTorch's own `F.linear` then takes in a NaN
    that lies beside rows of 88 columns in a wider tensor, where the next row's adapter may have put it.

    Args:
        rows: `[T, D]`.
    """
    dense = rows.stride(0) == rows.shape[1] or rows.device.type != "cpu" or rows.element_size() != 2
    if dense and rows.stride(1) == 1:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)  # `contiguous` keeps the stride of a single row


def forward(
    backend: Backend,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    plan: PlanTensors,
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
    plan: PlanTensors,
    wanted: tuple[bool, bool, bool] = (True, True, True),
    packed: Tensor | None = None,
    into: Gradients | None = None,
) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
    """`(dx, da, db)` by one compiled backend, or with None by that of x's device, as in a traced graph.

    `into` holds gradients to add dA and dB to; then none are returned.
    """
    if backend is None or backend == "cpu":
        dx, da, db = torch.ops.mlora_ext.lora_linear_backward.default(
            dy, x, weight, lora_a, lora_b, s, *plan, *wanted, packed
        )
        if into is None:
            return dx, da, db
        torch._foreach_add_([*into[0], *into[1]], [*da, *db])
        return dx, [], []
    with torch._C._AutoDispatchBelowAutograd():
        operator = gpu_operator(backend)  # type: ignore[arg-type]
        return _gpu_backward(operator, dy, x, weight, lora_a, lora_b, s, plan, wanted, into)


def gradients(
    backend: Backend | None,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    s: Tensor,
    plan: PlanTensors,
    packed: Tensor | None,
    wanted: tuple[bool, bool, bool],
    into: Gradients | None = None,
) -> tuple[Tensor | None, Sequence[Tensor | None], Sequence[Tensor | None]]:
    """The autograd formula: dx, and dA and dB of every adapter, as far as they are wanted."""
    dx, da, db = backward(backend, dense_rows(dy), x, weight, lora_a, lora_b, s, plan, wanted, packed, into)
    none: Sequence[None] = (None,) * len(lora_a)
    return dx if wanted[0] else None, da or none, db or none


def _library_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, lora_a, lora_b, *plan, _ = inputs
    ctx.num_adapters = len(lora_a)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1], *plan, *lora_a, *lora_b)


def _library_backward(ctx: Any, dy: Tensor | None, _: Tensor | None):  # type: ignore[no-untyped-def]
    n = ctx.num_adapters
    rest = (None,) * (len(PLAN) + 1)  # and for `packed`
    if dy is None:
        return (None, None, None, [None] * n, [None] * n, *rest)
    x, weight, s, *plan = ctx.saved_tensors[:8]
    lora_a, lora_b = ctx.saved_tensors[8 : 8 + n], ctx.saved_tensors[8 + n :]
    needs = ctx.needs_input_grad
    wanted = needs[0], any(needs[3]), any(needs[4])
    dx, da, db = gradients(None, dy, x, weight, lora_a, lora_b, s, tuple(plan), None, wanted)
    return (dx, None, None, list(da), list(db), *rest)


def _gpu_forward(
    operator: GpuOperator,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    plan: PlanTensors,
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
    plan: PlanTensors,
    wanted: tuple[bool, bool, bool],
    into: Gradients | None = None,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    layer, batch = Layer(weight, None, lora_b), Batch(*plan)  # type: ignore[arg-type]
    sums = Into() if into is None else Into(into[0], [into[1]])
    dx, da, (db,) = operator.backward([dy], x, [layer], lora_a, s.unsqueeze(0), batch, wanted, sums)
    return dx, da, db


def _cuda_forward(x, weight, bias, lora_a, lora_b, *rest):  # type: ignore[no-untyped-def]
    """The operator's kernel for CUDA tensors, as a compiled graph calls it."""
    return _gpu_forward(_of_device(x, weight), x, weight, bias, lora_a, lora_b, rest[: len(PLAN)])


def _cuda_backward(dy, x, weight, lora_a, lora_b, s, *rest):  # type: ignore[no-untyped-def]
    plan, wanted = rest[: len(PLAN)], rest[len(PLAN) : -1]
    # An operator's results may not share memory, as the views that eager mode gets do.
    da = [_fake_gradient(a) for a in one_dtype(lora_a)] if wanted[1] else []
    db = [_fake_gradient(b) for b in one_dtype(lora_b)] if wanted[2] else []
    into = Into(da or None, [db] if db else None, add=False)
    layer, batch = Layer(weight, None, lora_b), Batch(*plan)
    operator = _of_device(x, weight)
    dx, *_ = operator.backward([dy], x, [layer], lora_a, s.unsqueeze(0), batch, wanted, into)
    da = [gradient.to(a.dtype) for gradient, a in zip(da, lora_a, strict=False)]
    return dx, da, [gradient.to(b.dtype) for gradient, b in zip(db, lora_b, strict=False)]


def _of_device(x: Tensor, weight: Tensor) -> GpuOperator:
    shape = (weight.shape[1], weight.shape[0])
    return gpu_operator(backend_for(x.device, x.dtype, shape))  # type: ignore[arg-type]


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
