"""What a layer asks of its frozen weight. A new kind of weight is a class in one file: see `FrozenWeight`.

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
        packed_dx: the same for `dy W`.
    """

    weight: Tensor
    packed: Tensor | None = None
    packed_dx: Tensor | None = None


class FrozenWeight(ABC):
    """A frozen `W [O, D]` and its two products.

    A kind of weight is made for a layer: `kind(layer)` reads the layer's tensors, and may replace them, as a
    quantised kind does. It must not keep the layer itself. Tensors that belong to the layer's state are its
    parameters or buffers; the kind keeps `layer._parameters` or `layer._buffers` and looks them up at each
    use, so that `.to()`, `deepcopy` and `load_state_dict` keep both in step.

    Products run without autograd. `register_frozen_weight` gives a kind a name.

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
        """That of x and y; how the weight is stored does not matter."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where products are computed."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the weight takes, with everything that is kept beside it."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Returns W `[O, D]` as a plain tensor of `dtype`: the weight itself, or made anew."""

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
        """Returns the weight for an x of another dtype, as autocast asks for it."""
        return self

    def fused(self, x: Tensor) -> FusedOperands | None:
        """Returns the weight for the operator's one fused call with this x; None: two calls are made.

        Args:
            x: `[T, D]`.
        """
        return None

    def prefetch(self) -> None:  # noqa: B027 - most kinds have nothing to do
        """Says that the weight is needed soon: a kind that fetches it from elsewhere may begin."""

    def moved(self) -> None:  # noqa: B027 - most kinds have nothing to do
        """Says that the layer's tensors have moved or changed their dtype."""


FrozenKind = Callable[[nn.Module], FrozenWeight]
"""Makes the frozen weight of a layer; see `FrozenWeight`."""
