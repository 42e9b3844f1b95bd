"""A frozen weight as it was loaded, in the dtype of x."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor, nn

from .base_gemm import linear, linear_dx
from .weight import FrozenWeight, FusedOperands


class PlainWeight(FrozenWeight):
    """A layer's own `weight`.

    Args:
        layer: has a parameter `weight`: `[O, D]`, or `[D, O]` if its `fan_in_fan_out` is true.
    """

    _name = "weight"

    def __init__(self, layer: nn.Module) -> None:
        self._tensors: Mapping[str, Tensor | None] = layer._parameters
        self._transposed = bool(getattr(layer, "fan_in_fan_out", False))

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """Makes a frozen weight that belongs to no layer, from `[O, D]`; it may be a transposed view."""
        return cls.named({"weight": weight}, "weight")

    @classmethod
    def named(cls, tensors: Mapping[str, Tensor | None], name: str) -> Self:
        """Makes a frozen weight of a layer's parameter of any name, from all of its parameters."""
        plain = cls.__new__(cls)
        plain._tensors, plain._name, plain._transposed = tensors, name, False
        return plain

    def dense(self) -> Tensor:
        """Returns the weight itself as `[O, D]`, without a copy."""
        weight = self._tensors[self._name]
        assert weight is not None
        return weight.t() if self._transposed else weight

    @property
    def shape(self) -> tuple[int, int]:
        """`(O, D)`."""
        rows, columns = self.dense().shape
        return rows, columns

    @property
    def dtype(self) -> torch.dtype:
        return self.dense().dtype

    @property
    def device(self) -> torch.device:
        return self.dense().device

    @property
    def nbytes(self) -> int:
        return self.dense().nbytes

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns `x Wᵀ + b` by the faster library (`base_gemm`)."""
        return linear(x, self.dense(), bias)

    def matmul_dx(self, dy: Tensor) -> Tensor:
        """Returns `dy W` by the faster library (`base_gemm`)."""
        return linear_dx(dy, self.dense())

    def add_matmul(self, y: Tensor, x: Tensor) -> None:
        """Adds `x Wᵀ` to y in one product."""
        y.addmm_(x, self.dense().t())

    def add_matmul_dx(self, dx: Tensor, dy: Tensor) -> None:
        """Adds `dy W` to dx in one product."""
        dx.addmm_(dy, self.dense())

    def cast(self, dtype: torch.dtype) -> FrozenWeight:
        """Returns the weight cast to another dtype, as autocast does."""
        return PlainWeight.of(self.dense().to(dtype))

    def fused(self, x: Tensor) -> FusedOperands:
        """Returns the weight for the operator's one fused call."""
        weight = self._tensors[self._name]  # as `dense`, without a call: each layer comes here in each step
        assert weight is not None
        return FusedOperands(weight.t() if self._transposed else weight)
