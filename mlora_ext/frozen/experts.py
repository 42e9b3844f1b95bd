"""A stack of experts' frozen weights as one weight, for rows that are sorted by expert.

Letters: S rows, D = d_in, O = d_out, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .weight import FrozenWeight


@dataclass(frozen=True, eq=False)
class Groups:
    """Which rows belong to which expert.

    Attributes:
        experts: `[S]` int64, ascending: the expert of each row.
        ends: `[E]` int32: the row after the last one of each expert.
    """

    experts: Tensor
    ends: Tensor


class ExpertsWeight(FrozenWeight):
    """A frozen parameter `[E, O, D]` of a module of experts; products use each row's own expert.

    Args:
        tensors: the module's parameters; the weight is looked up at each use.
        name: of the parameter.
        transposed: whether it is stored as `[E, D, O]`, as in gpt-oss.
        biased: whether the parameter `<name>_bias [E, O]` is added.
        groups: of the rows; None: for shape and place only.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor | None],
        name: str,
        transposed: bool,
        biased: bool = False,
        groups: Groups | None = None,
    ) -> None:
        self._tensors, self._name, self._transposed = tensors, name, transposed
        self._biased, self._groups = biased, groups

    def dense(self) -> Tensor:
        """Returns the stack `[E, O, D]`: the parameter itself or a view."""
        weight = self._tensors[self._name]
        assert weight is not None
        return weight.transpose(1, 2) if self._transposed else weight

    @property
    def shape(self) -> tuple[int, int]:
        """`(O, D)` of one expert."""
        _, rows, columns = self.dense().shape
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
        """Returns `x_s W_eᵀ + b_e` for every row s and its expert e, `[S, O]`."""
        assert self._groups is not None
        assert bias is None
        y = grouped_product(x, self.dense().to(x.dtype).transpose(1, 2), self._groups.ends)
        if self._biased:
            own = self._tensors[f"{self._name}_bias"]
            assert own is not None
            y += own.to(x.dtype).index_select(0, self._groups.experts)
        return y

    def matmul_dx(self, dy: Tensor) -> Tensor:
        """Returns `dy_s W_e` for every row s and its expert e, `[S, D]`."""
        assert self._groups is not None
        return grouped_product(dy, self.dense().to(dy.dtype), self._groups.ends)


def grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Returns `[S, O]`: rows up to `ends[0]` times `weights[0]`, the next ones times `weights[1]`, and so on.

    Args:
        x: `[S, D]`.
        weights: `[E, D, O]`, dtype of x.
        ends: `[E]` int32 ascending; the last is S.
    """
    if isinstance(x, FakeTensor) or not len(x):
        return x.new_empty(len(x), weights.shape[2])
    if _serves(x, weights):
        return torch.nn.functional.grouped_mm(x, weights, offs=ends)
    y = x.new_empty(len(x), weights.shape[2])
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            torch.mm(x[begin:end], weights[expert], out=y[begin:end])
        begin = end
    return y


def _serves(x: Tensor, weights: Tensor) -> bool:
    """Whether PyTorch's grouped product takes these: strides of 16 bytes, and no fp64."""
    if x.dtype == torch.float64:
        return False
    strides = (x.stride(0), *(stride for stride in weights.stride() if stride != 1))
    dense = x.stride(1) == 1 and 1 in weights.stride()[1:]
    return dense and all(stride * x.element_size() % 16 == 0 for stride in strides)
