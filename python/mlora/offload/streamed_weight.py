"""A frozen weight that is in memory only while its block is used."""

from __future__ import annotations

import torch
from torch import Tensor

from mlora.offload.stream import BlockStream
from mlora_ext.frozen.base_gemm import linear, linear_dx
from mlora_ext.frozen.weight import FrozenWeight


class StreamedWeight(FrozenWeight):
    """One layer's weight in a block of a `BlockStream`.

    Args:
        stream: gives out its block.
        block: the block's number in the stream.
        name: of the weight in the block.
        meta: has the weight's shape, as the layer's parameter had it, and its dtype.
        transposed: whether the stored weight is `[D, O]`.
    """

    def __init__(
        self, stream: BlockStream, block: int, name: str, meta: Tensor, *, transposed: bool = False
    ) -> None:
        self._stream, self._block, self._name, self._transposed = stream, block, name, transposed
        rows, columns = meta.shape
        self._shape = (columns, rows) if transposed else (rows, columns)
        self._dtype = meta.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """Nothing: the stream's slots take the memory, not the weight."""
        return 0

    def dense(self) -> Tensor:
        """Returns the weight in its slot: valid until a weight of another block is used."""
        weight = self._stream.tensors(self._block)[self._name]
        return weight.t() if self._transposed else weight

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, self.dense().to(x.dtype), bias)

    def matmul_dx(self, dy: Tensor) -> Tensor:
        return linear_dx(dy, self.dense().to(dy.dtype))

    def add_matmul(self, y: Tensor, x: Tensor) -> None:
        y.addmm_(x, self.dense().to(x.dtype).t())

    def add_matmul_dx(self, dx: Tensor, dy: Tensor) -> None:
        dx.addmm_(dy, self.dense().to(dy.dtype))

    def prefetch(self) -> None:
        self._stream.prefetch(self._block)
