"""The interface of a frozen weight. To add a kind, write one class: see `FrozenWeight`.

Letters: T rows, D = d_in, O = d_out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class FusedOperands(NamedTuple):
    """A plain weight for the operator's one fused call.

    Attributes:
        weight: `[O, D]`, dtype of x.
        packed: the weight in oneDNN's layout for `x Wᵀ`, or None.
        packed_dx: the weight in oneDNN's layout for `dy W`, or None.
    """

    weight: Tensor
    packed: Tensor | None = None
    packed_dx: Tensor | None = None


class FrozenWeight(ABC):
    """A frozen `W [O, D]` and its two products, `x Wᵀ + b` and `dy W`. Products run without autograd.

    `kind(layer)` makes the frozen weight of a layer. It reads the layer's tensors and may replace them, as a
    quantised kind does. It must not keep the layer itself. Tensors that belong to the layer's state must be
    parameters or buffers of the layer: keep `layer._parameters` or `layer._buffers`, and look the tensors up
    at each use. Then `.to()`, `deepcopy` and `load_state_dict` keep layer and weight in step.

    Register a kind with `register_frozen_weight`.

    Example:
        >>> class Halved(FrozenWeight):
        ...     def __init__(self, layer):
        ...         layer.register_buffer("half", layer.frozen.dense().half())
        ...         layer.weight = None
        ...         self._buffers = layer._buffers
        ...
        ...     def dense(self):
        ...         return self._buffers["half"].float()
        ...     # and shape, dtype, device, nbytes
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """`(O, D)`."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of x and y; the stored weight may have another one."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device on which products are computed."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the weight and of everything kept beside it."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Returns W `[O, D]` as a plain tensor of `dtype`: the weight itself or a new tensor."""

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns `x Wᵀ + b`.

        Args:
            x: `[T, D]`.
            bias: `[O]` or None.

        Returns:
            `[T, O]`, dtype of x, dense rows; the caller may write to it.
        """
        return nn.functional.linear(x, self.dense().to(x.dtype), bias)

    def matmul_dx(self, dy: Tensor) -> Tensor:
        """Returns `dy W`.

        Args:
            dy: `[T, O]`.

        Returns:
            `[T, D]`, dtype of dy, dense rows; the caller may write to it.
        """
        return dy @ self.dense().to(dy.dtype)

    def add_matmul(self, y: Tensor, x: Tensor) -> None:
        """Adds `x Wᵀ` to `y [T, O]`."""
        y.add_(self.matmul(x))

    def add_matmul_dx(self, dx: Tensor, dy: Tensor) -> None:
        """Adds `dy W` to `dx [T, D]`."""
        dx.add_(self.matmul_dx(dy))

    def cast(self, dtype: torch.dtype) -> FrozenWeight:
        """Returns the weight for an x of another dtype, as autocast asks for it. Default: the same object."""
        return self

    def fused(self, x: Tensor) -> FusedOperands | None:
        """Returns the weight for the operator's one fused call, or None for two calls, `matmul` first.

        Args:
            x: `[T, D]`.
        """
        return None

    def prefetch(self) -> None:  # noqa: B027 - most kinds have nothing to do
        """Tells the weight that it is needed soon; a kind that fetches it from elsewhere may begin."""

    def moved(self) -> None:  # noqa: B027 - most kinds have nothing to do
        """Tells the weight that the layer's tensors have moved or changed their dtype."""


FrozenKind = Callable[[nn.Module], FrozenWeight]
"""Makes the frozen weight of a layer; see `FrozenWeight`."""
