"""The operator where adapters keep their gradients: its host time does not grow with the adapters.

Autograd sees x and one anchor, and backward adds to the gradients itself, as `Router.accumulates` allows. The
tables of addresses are made once and serve until an adapter or a gradient lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction

from ..backends import one_layer
from ..backends.factors import Factors, factors_of
from ..backends.interface import Adapters, Layer, PlanTensors
from ..backends.selection import Backend, gpu_operator
from ..frozen.rows import dense_rows
from ..frozen.weight import FrozenWeight, FusedOperands
from ..library import check_library
from ..once_differentiable import once_differentiable


@dataclass
class UpdateCounts:
    """Counts the updates of adapters in place, so that backward notices one after its forward pass."""

    count: int = 0
    latest: dict[str, int] = field(default_factory=dict)

    def record(self, name: str) -> None:
        """Counts an update of one adapter."""
        self.count += 1
        self.latest[name] = self.count

    def refuse(self, names: Sequence[str], since: int) -> None:
        """Raises RuntimeError, naming it, if one of these adapters was updated after the count `since`."""
        for name in names:
            if self.latest.get(name, 0) > since:
                raise RuntimeError(
                    f"adapter {name!r} was changed in place between forward and backward, for example by an "
                    "optimizer step; run backward before you change it"
                )


@dataclass(frozen=True, eq=False, slots=True)
class HeldAdapters:
    """Adapters of one layer, or of several that share x, as tables of addresses.

    Attributes:
        names: of the adapters.
        tables: of A and B.
        written: of each layer, the names of adapters to whose gradients backward has added; whoever clears
            a gradient takes its name out.
    """

    names: tuple[str, ...]
    tables: Adapters
    written: Sequence[set[str]]

    def mark(self, dys: Sequence[Tensor | None]) -> None:
        """Notes that backward adds to the gradients of layers whose output was used."""
        for names, dy in zip(self.written, dys, strict=True):
            if dy is not None:
                names.update(self.names)


def hold(
    names: tuple[str, ...],
    lora_a: Sequence[Sequence[nn.Parameter]],
    lora_b: Sequence[Sequence[nn.Parameter]],
    written: Sequence[set[str]],
) -> HeldAdapters | None:
    """Returns tables of adapters, or None where autograd must add to the gradients.

    Every Parameter must be fp32 and have a dense fp32 gradient and no hook. Only fp32, because adding before
    rounding differs from adding after it.

    Args:
        names: of the adapters.
        lora_a: of each layer, its adapters' `[r, d_in]`.
        lora_b: of each layer, its adapters' `[d_out, r]`.
        written: see `HeldAdapters`.
    """
    check_library()
    every = [p for layer in (*lora_a, *lora_b) for p in layer]
    if not every or not all(map(keeps_gradient, every)):
        return None
    a = _table([p for layer in lora_a for p in layer], False)
    b = _table([p for layer in lora_b for p in layer], True)
    return HeldAdapters(names, Adapters(a, b), written)


def _table(parameters: Sequence[nn.Parameter], transposed: bool) -> Factors:
    gradients = [p.grad for p in parameters if p.grad is not None]
    return factors_of([p.detach() for p in parameters], transposed=transposed, gradients=gradients)


def keeps_gradient(parameter: nn.Parameter) -> bool:
    """Whether backward may add to a Parameter's gradient itself: fp32, dense, and without hooks."""
    gradient = parameter.grad
    if gradient is None or not parameter.requires_grad or type(gradient) is not Tensor:
        return False
    if parameter.dtype != torch.float32 or gradient.dtype != torch.float32 or gradient.is_sparse:
        return False
    if not (gradient.is_contiguous() or gradient.t().is_contiguous()):
        return False
    return not (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


class Call(NamedTuple):
    """What a call needs beside x.

    Attributes:
        frozen: W `[d_out, d_in]` of each layer.
        biases: `[d_out]` or None, of each layer.
        adapters: of the layers.
        plan: the tensors of `one_layer.PLAN`.
        backend: which computes; several layers need one for GPUs.
        updates: the counts of the adapters' updates in place.
    """

    frozen: Sequence[FrozenWeight]
    biases: Sequence[Tensor | None]
    adapters: HeldAdapters
    plan: PlanTensors
    backend: Backend
    updates: UpdateCounts


def lora_linear_held(x: Tensor, call: Call) -> Sequence[Tensor]:
    """Returns `y` of one layer, or of several that share x; backward adds to the adapters' gradients.

    Args:
        x: `[T, d_in]`, dense rows, in a dtype that the backend serves.
        call: everything else.
    """
    return _Held.apply(x, anchor(), call)  # type: ignore[attr-defined, no-any-return]


@cache
@torch.inference_mode(False)
def anchor() -> Tensor:
    """Returns a tensor that requires a gradient: the graph holds a layer even if its x needs none."""
    return torch.empty(0, device="cpu", requires_grad=True)


class _Held(_SingleLevelFunction):
    """A `torch.autograd.Function` without its support of `torch.func`, which takes 2 µs a call.

    `_SingleLevelFunction` is the private base class of `Function` in torch 2.11 to 2.13.
    """

    @staticmethod
    def forward(ctx: Any, x, anchor, call):  # type: ignore[no-untyped-def]
        frozen, biases, held, plan, backend, updates = call
        ctx.set_materialize_grads(False)
        ctx.call, ctx.since = call, updates.count
        ctx.operands = [one.fused(x) for one in frozen]
        weights = [None if one is None else one.weight for one in ctx.operands]
        if backend == "cpu":
            a, b = held.tables
            y, s = one_layer.cpu_forward(x, frozen[0], ctx.operands[0], biases[0], a, b, plan)
            ctx.save_for_backward(x, weights[0], s)
            return (y,)
        layers = list(map(Layer, frozen, weights, biases))
        ys, saved = gpu_operator(backend).forward(x, layers, held.tables, plan)
        # what `autograd` saves, in its order: a checkpoint may recompute by its way
        ctx.save_for_backward(x, *weights, *saved)
        return tuple(ys)

    @staticmethod
    @once_differentiable(lambda ctx: ctx.saved_tensors[:1])
    def backward(ctx: Any, *dys: Tensor | None):  # type: ignore[no-untyped-def]
        frozen, _, held, plan, backend, updates = ctx.call
        if dys[0] is None and not any(dy is not None for dy in dys):
            return None, None, None
        if updates.count != ctx.since:
            updates.refuse(held.names, ctx.since)
        if not torch._C._will_engine_execute_node(ctx.next_functions[1][0]):  # the anchor's
            raise RuntimeError(
                "adapters keep their gradients, and this backward pass is of some inputs only; call "
                "Tensor.backward without inputs=, and torch.autograd.grad before the gradients are held"
            )
        x, *rest = ctx.saved_tensors
        weights, saved = rest[: len(frozen)], tuple(rest[len(frozen) :])
        held.mark(dys)
        wanted = ctx.needs_input_grad[0], True, True
        if backend == "cpu":
            (dy,), (s,), (weight,) = map(dense_rows, dys), saved, weights  # type: ignore[arg-type]
            operands = None if weight is None else FusedOperands(weight, *ctx.operands[0][1:])
            a, b = held.tables
            dx, _, _ = one_layer.cpu_backward(dy, x, frozen[0], operands, a, b, s, plan, wanted)
        else:
            rows = [
                x.new_zeros(len(x), one.shape[0]) if dy is None else dense_rows(dy)
                for dy, one in zip(dys, frozen, strict=True)
            ]
            layers = list(map(Layer, frozen, weights))
            dx = gpu_operator(backend).backward(rows, x, layers, held.tables, saved, plan, wanted)
        return dx if wanted[0] else None, None, None
