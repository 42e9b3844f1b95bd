"""Reads of a trained module's weights by other modules, such as a head that multiplies by the embedding's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ATTRIBUTES = ("device", "dtype", "is_meta", "ndim", "requires_grad", "shape")
_TELLS_NO_VALUES = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(Tensor.dim, Tensor.element_size, Tensor.is_floating_point, Tensor.numel, Tensor.size),
}


class ReadFromOutside(Tensor):
    """Tells only shape and dtype: each adapter of a mixed batch has its own values of this parameter."""

    layer: str

    @classmethod
    def of(cls, parameter: Tensor, layer: str) -> ReadFromOutside:
        """Returns this view of a parameter; `layer` names it in messages."""
        read = parameter.detach().as_subclass(cls)
        read.layer = layer
        return read

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _TELLS_NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs or {})
        found = [one for one in args if isinstance(one, cls)]
        layer = found[0].layer if found else "with trained weights"
        raise outside_read(layer)


def outside_read(layer: str) -> ValueError:
    """Returns the error for a read in a mixed batch."""
    return ValueError(
        f"layer {layer}: another module reads its weights without calling it, and adapters of this batch "
        "have their own; use one adapter for the whole batch, or leave it out of modules_to_save and "
        "trainable_token_indices"
    )
