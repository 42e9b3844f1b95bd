"""Marks a backward pass that cannot be differentiated itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., Any]
Inputs = Callable[[Any], Iterable[Tensor]]


def once_differentiable(inputs: Inputs) -> Callable[[Backward], Backward]:
    """Makes a second derivative an error, as `torch.autograd.function.once_differentiable` means to.

    That one lets `torch.autograd.grad` overlook it: its error hangs on no input, so a penalty on gradients is
    left out without a word. It also takes 3 µs a call even if no graph is made.

    Args:
        inputs: returns the tensors that the gradients depend on, beside those that backward gets, from `ctx`.
    """

    def decorated(backward: Backward) -> Backward:
        @wraps(backward)
        def chosen(ctx: Any, *dys: Any) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *dys)
            with torch.no_grad():
                found = backward(ctx, *dys)
            gradients = found if isinstance(found, tuple) else (found,)
            given = [one for one in (*dys, *inputs(ctx)) if isinstance(one, Tensor)]
            made = [one for one in gradients if one is not None]
            marked = iter(_Once.apply(len(made), *made, *given) if made else ())  # type: ignore[no-untyped-call]
            results = tuple(None if one is None else next(marked) for one in gradients)
            return results if isinstance(found, tuple) else results[0]

        return chosen

    return decorated


class _Once(torch.autograd.Function):
    """Hands gradients on; their own backward pass is the error."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(one.detach() for one in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> None:
        raise RuntimeError(
            "second derivatives: the backward pass of a layer with adapters, or of a frozen layer, cannot be "
            "differentiated; leave out penalties on gradients, or, if every linear layer has adapters, make "
            "the pass inside mlora_ext.use_backend('reference')"
        )
