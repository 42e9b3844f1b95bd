"""Reads of a trained module's weights by other modules, such as a head that multiplies by the embedding's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

_ATTRIBUTES = ("device", "dtype", "is_meta", "ndim", "requires_grad", "shape")
_TELLS_NO_VALUES = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(Tensor.dim, Tensor.element_size, Tensor.is_floating_point, Tensor.numel, Tensor.size),
}
_TRANSPOSES = {
    *(getattr(Tensor, name).__get__ for name in ("T", "mT")),
    *(Tensor.t, torch.t, Tensor.transpose, torch.transpose),
}
_BOTH = ((), (0, 1), (1, 0), (-1, -2), (-2, -1))
_MULTIPLIES = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}


class ReadFromOutside(Tensor):
    """A parameter W of which each adapter of a mixed batch has values of its own.

    It tells shape and dtype, and gives products `x Wᵀ`, as `F.linear(x, W)` or `x @ W.T`.

    Attributes:
        layer: names the parameter's module in messages.
        product: returns `[..., O]` for x `[..., D]`: each row's product with its own W.
        refuses: whether other functions are refused. In trial passes they use the base's values.
        transposed: whether this is Wᵀ.
    """

    layer: str
    product: Callable[[Tensor], Tensor]
    refuses: bool
    transposed: bool

    @classmethod
    def of(
        cls,
        parameter: Tensor,
        layer: str,
        product: Callable[[Tensor], Tensor],
        refuses: bool,
        transposed: bool = False,
    ) -> ReadFromOutside:
        """Returns this view of a parameter."""
        read = parameter.detach().as_subclass(cls)
        read.layer, read.product, read.refuses, read.transposed = layer, product, refuses, transposed
        return read

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        read = next((one for one in tree_leaves((args, named)) if isinstance(one, cls)), None)
        if read is not None and (factors := _factors(function, read, args, named)):
            y = read.product(factors[0])
            return y if factors[1] is None else y + factors[1]
        turns = read is not None and function in _TRANSPOSES and args[1:] in _BOTH and not named
        if not turns and function not in _TELLS_NO_VALUES and (read is None or read.refuses):
            raise outside_read(read.layer if read is not None else "with trained weights")
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **named)
        if read is None or not turns:
            return found
        return cls.of(found, read.layer, read.product, read.refuses, not read.transposed)


def _factors(
    function: Any, read: ReadFromOutside, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Tensor, Any] | None:
    """Returns x and the bias if a call is a product `x Wᵀ + b`; else None."""
    if len(args) < 2 or args[1] is not read or isinstance(args[0], ReadFromOutside):
        return None
    if function is F.linear and not read.transposed:
        return args[0], args[2] if len(args) > 2 else named.get("bias")
    return (args[0], None) if function in _MULTIPLIES and read.transposed else None


def outside_read(layer: str) -> ValueError:
    """Returns the error for a read in a mixed batch."""
    return ValueError(
        f"layer {layer}: another module reads its weights without calling it, and adapters of this batch "
        "have their own; use one adapter for the whole batch, or leave it out of modules_to_save and "
        "trainable_token_indices"
    )
