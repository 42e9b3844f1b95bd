"""Reads of a trained module's weights by other modules, such as a head that multiplies by the embedding's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

_ATTRIBUTES = (
    *("device", "dtype", "is_cpu", "is_cuda", "is_meta", "is_quantized", "is_sparse"),
    *("layout", "ndim", "requires_grad", "shape"),
)
_TELLS_NO_VALUES = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(Tensor.__len__, Tensor.dim, Tensor.element_size, Tensor.numel, Tensor.size, Tensor.stride),
    *(Tensor.get_device, Tensor.is_contiguous, Tensor.is_complex, Tensor.is_floating_point),
    *(torch.numel, torch.is_complex, torch.is_floating_point),
}
_CASTS = {
    *(Tensor.to, Tensor.type_as),
    *(Tensor.bfloat16, Tensor.double, Tensor.float, Tensor.half),
}
_TRANSPOSES = {
    *(getattr(Tensor, name).__get__ for name in ("T", "mT")),
    *(Tensor.t, torch.t, Tensor.transpose, torch.transpose),
}
_BOTH = ((), (0, 1), (1, 0), (-1, -2), (-2, -1))
_MULTIPLIES = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}


class ReadFromOutside(Tensor):
    """A parameter W of which each adapter of a mixed batch has values of its own.

    It tells shape and dtype, and gives products `x Wᵀ`, as `F.linear(x, W)` or `x @ W.to(dtype).T`.

    Attributes:
        product: returns `[..., O]` for x `[..., D]`: each row's product with its own W. It also gets the
            base's W, in the dtype that the products shall use.
        refusal: why other functions are refused; empty in trial passes, where they use the base's values.
        transposed: whether this is Wᵀ.
    """

    product: Callable[[Tensor, Tensor], Tensor]
    refusal: str
    transposed: bool

    @classmethod
    def of(
        cls,
        parameter: Tensor,
        product: Callable[[Tensor, Tensor], Tensor],
        refusal: str,
        transposed: bool = False,
    ) -> ReadFromOutside:
        """Returns this view of a parameter."""
        read = parameter.detach().as_subclass(cls)
        read.product, read.refusal, read.transposed = product, refusal, transposed
        return read

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        read = next((one for one in tree_leaves((args, named)) if isinstance(one, cls)), None)
        assert read is not None
        if factors := _factors(function, read, args, named):
            y = read.product(factors[0], read._base_values())
            return y if factors[1] is None else y + factors[1]
        turns = function in _TRANSPOSES and args[1:] in _BOTH and not named
        casts = function in _CASTS and args[0] is read
        tells = function in _TELLS_NO_VALUES or (function in _CASTS and not casts)
        if not (turns or casts or tells) and read.refusal:
            raise ValueError(read.refusal)
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **named)
        if found is read or not (turns or casts):
            return found
        return cls.of(found, read.product, read.refusal, read.transposed != turns)

    def _base_values(self) -> Tensor:
        """Returns the base's W."""
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.as_subclass(Tensor)
            return plain.t() if self.transposed else plain


def _factors(
    function: Any, read: ReadFromOutside, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Tensor, Any] | None:
    """Returns x and the bias if a call is a product `x Wᵀ + b`; else None."""
    if len(args) < 2 or args[1] is not read or isinstance(args[0], ReadFromOutside):
        return None
    if function is F.linear and not read.transposed:
        return args[0], args[2] if len(args) > 2 else named.get("bias")
    return (args[0], None) if function in _MULTIPLIES and read.transposed else None


def refusal_in_mixed_batch(layer: str) -> str:
    """Returns why values of a layer's weights cannot be read in a mixed batch."""
    return (
        f"layer {layer}: another module reads its weights without calling it, and adapters of this batch "
        "have their own; use one adapter for the whole batch, or leave it out of modules_to_save and "
        "trainable_token_indices"
    )
