"""Products with a quantised weight, one block of dequantised rows at a time.

Letters: T rows of x, D = d_in, O = d_out, n rows of W in a block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ..base_gemm import linear, linear_dx
from ..weight import FrozenWeight

BLOCK_BYTES = 16 << 20
"""The most bytes of dequantised rows at a time on a CPU, or as many rows as x has, if these are more.

Smaller blocks make the products slower. A block of W with fewer rows than x saves nothing: the parts of the
result that each block makes are then larger than the block.
"""


class QuantizedWeight(FrozenWeight):
    """A frozen weight in fewer bits, dequantised at each use and never kept dequantised.

    On a CPU a product dequantises a block of rows at a time, see `BLOCK_BYTES`; on other devices, one layer.

    Attributes:
        compute_dtype: dtype of the products; None: that of x. Results have the dtype of x.
        row_step: blocks begin at multiples of this row.
    """

    compute_dtype: torch.dtype | None = None
    row_step: int = 1

    @abstractmethod
    def rows(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Returns rows `[begin, end)` of W as a new plain tensor `[n, D]` of this dtype, with any strides."""

    def dense(self) -> Tensor:
        """Returns all of W, dequantised: `[O, D]`."""
        return self.rows(0, self.shape[0], self.dtype)

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns `x Wᵀ + b`; each block of W makes some columns."""
        dtype = self.compute_dtype or x.dtype
        given, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        blocks = list(self._blocks(dtype, len(x)))
        if len(blocks) == 1:
            return linear(given, self.rows(*blocks[0], dtype), bias).to(x.dtype)
        y = x.new_empty(len(x), self.shape[0])
        for begin, end in blocks:
            part = None if bias is None else bias[begin:end]
            y[:, begin:end] = linear(given, self.rows(begin, end, dtype), part)
        return y

    def matmul_dx(self, dy: Tensor) -> Tensor:
        """Returns `dy W`, a sum over the blocks of W; sums of 16-bit products are kept in fp32."""
        dtype = self.compute_dtype or dy.dtype
        given = dy.to(dtype)
        blocks = list(self._blocks(dtype, len(dy)))
        if len(blocks) == 1:
            return linear_dx(given, self.rows(*blocks[0], dtype)).to(dy.dtype)
        dx = dy.new_zeros(len(dy), self.shape[1], dtype=torch.promote_types(dtype, torch.float32))
        for begin, end in blocks:
            dx += linear_dx(given[:, begin:end], self.rows(begin, end, dtype))
        return dx.to(dy.dtype)

    def _blocks(self, dtype: torch.dtype, rows_of_x: int) -> Iterator[tuple[int, int]]:
        """Yields the first row of each block, and the one behind its last."""
        rows, columns = self.shape
        step = rows
        if self.device.type == "cpu":
            most = max(BLOCK_BYTES // max(1, columns * dtype.itemsize), rows_of_x)
            step = max(1, most // self.row_step) * self.row_step
        for begin in range(0, rows, max(1, step)):
            yield begin, min(begin + step, rows)


class BufferedWeight(QuantizedWeight):
    """A quantised weight whose numbers and scales are buffers `weight_*` of its layer.

    Args:
        layer: gets the buffers; its parameter `weight` goes.
        shape: `(O, D)`.
        dtype: of x.
        kept: the tensors by name; the first one has the numbers. Scales are given as integers (`bits_of`),
            because a change of the model's dtype leaves these alone.
    """

    def __init__(
        self, layer: nn.Module, shape: tuple[int, int], dtype: torch.dtype, kept: Mapping[str, Tensor]
    ) -> None:
        self._shape, self._dtype, self._names = shape, dtype, tuple(kept)
        self._buffers: Mapping[str, Tensor | None] = layer._buffers
        layer._parameters["weight"] = None
        for name, tensor in kept.items():
            layer.register_buffer(f"weight_{name}", tensor.detach())

    @property
    def shape(self) -> tuple[int, int]:
        """`(O, D)`."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of x when the weight was taken over."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._kept(self._names[0]).device

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers and of everything that is needed to read them."""
        return sum(self._kept(name).nbytes for name in self._names)

    def _kept(self, name: str) -> Tensor:
        tensor = self._buffers[f"weight_{name}"]
        assert tensor is not None
        return tensor


def bits_of(statistics: Tensor) -> Tensor:
    """Returns fp32 numbers as integers, so that `.half()` and the like leave their bits alone."""
    return statistics.detach().to(torch.float32).contiguous().view(torch.int32)


def floats_of(bits: Tensor) -> Tensor:
    """Returns the fp32 numbers that `bits_of` was given, without a copy."""
    return bits.view(torch.float32)
