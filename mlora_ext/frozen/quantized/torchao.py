"""torchao's weight-only formats: int8, int4 that is held in 8 bits, float8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .blocks import QuantizedWeight


class TorchaoWeight(QuantizedWeight):
    """A layer's own `weight`, a tensor subclass of torchao that dequantises its rows.

    Args:
        layer: has the parameter `weight [O, D]`.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._tensors: Mapping[str, Tensor | None] = layer._parameters
        self.row_step = _rows_of_a_scale(self._weight)

    @property
    def _weight(self) -> Any:
        weight = self._tensors["weight"]
        assert weight is not None
        return weight.detach()

    @property
    def shape(self) -> tuple[int, int]:
        """`(O, D)`."""
        rows, columns = self._weight.shape
        return rows, columns

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weight that was quantised."""
        dtype: torch.dtype = self._weight.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self._weight.device
        return device

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers, their scales and their zero points."""
        return stored_bytes(self._weight)

    def rows(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        whole = end - begin == self.shape[0]
        part = self._weight if whole else self._weight[begin:end]
        rows: Tensor = part.dequantize()
        return rows.to(dtype)


def _rows_of_a_scale(weight: Any) -> int:
    size = getattr(weight, "block_size", None)
    return 1 if size is None or int(size[0]) >= weight.shape[0] else int(size[0])


def stored_bytes(tensor: Tensor) -> int:
    """Returns the bytes that a tensor holds; those of its parts if it is a subclass that wraps others."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(stored_bytes(getattr(tensor, name)) for name in names)


def fault(source: nn.Module) -> str | None:
    """Returns why a linear layer with a weight of torchao cannot be used, or None."""
    weight: Any = source.weight.detach()  # type: ignore[operator, union-attr]
    name = type(weight).__name__
    if getattr(weight, "act_quant_kwargs", None) is not None or name == "LinearActivationQuantizedTensor":
        return f"torchao's {name} also quantises the layer's input; use a weight-only config"
    try:
        rows = weight[: _rows_of_a_scale(weight)].dequantize()
    except (NotImplementedError, AttributeError, RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        return f"torchao's {name} does not dequantise rows on {weight.device.type}: {reason}"
    return None if rows.shape[-1:] == weight.shape[-1:] else f"torchao's {name} has another shape inside"
