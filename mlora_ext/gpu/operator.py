"""The operator on a GPU: memory, and the launches of a backend around the base GEMM.

The low-rank part is written first, and the base GEMM adds to it (beta = 1), so that y and dx are written
once and read once. Letters: T rows, D = d_in, O = d_out, R largest rank, N adapters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .factors import Factors, factors_of
from .kernels import Dropout, LaunchKernels
from .launches import backward_launches, column_splits, forward_launches
from .plan import Plan, PlanCache, PlanSizes


class GpuOperator:
    """`mlora_ext::lora_linear` and its backward by one backend's kernels.

    Args:
        kernels: the backend's launches.
    """

    def __init__(self, kernels: LaunchKernels) -> None:
        self._kernels = kernels
        self._plans = PlanCache(kernels.plan)

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Sequence[Tensor],
        lora_b: Sequence[Tensor],
        segments: Tensor,
        scaling: Tensor,
        dropout_p: Tensor | None,
        dropout_rng: Tensor | None,
        layer: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`(y, s)`; arguments as in docs/design.md."""
        if not lora_a:
            return torch.nn.functional.linear(x, weight, bias), x.new_empty(x.shape[0], 0)
        a, b = _one_dtype(lora_a), _one_dtype(lora_b)
        call = _Forward(self._kernels, x, weight, bias, a, b, scaling)
        call.plan = self._plan(segments, x, lora_a)
        call.dropout = _dropout(dropout_p, dropout_rng, layer)
        for launch in forward_launches(x.shape[1]):
            getattr(call, launch)()
        return call.y, call.s

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        lora_a: Sequence[Tensor],
        lora_b: Sequence[Tensor],
        s: Tensor,
        segments: Tensor,
        scaling: Tensor,
        dropout_p: Tensor | None,
        dropout_rng: Tensor | None,
        layer: Tensor | None,
        need_dx: bool,
        need_da: bool,
        need_db: bool,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """`(dx, da, db)`; arguments as in docs/design.md."""
        if not lora_a:
            return (dy @ weight if need_dx else dy.new_empty(0)), [], []
        wanted = need_dx, need_da, need_db
        call = _Backward(
            self._kernels, dy, x, weight, _one_dtype(lora_a), _one_dtype(lora_b), s, scaling, wanted
        )
        call.plan = self._plan(segments, x, lora_a)
        call.dropout = _dropout(dropout_p, dropout_rng, layer)
        for launch in call.launches():
            getattr(call, launch)()
        return (
            dy.new_empty(0) if call.dx is None else call.dx,
            [g.to(a.dtype) for g, a in zip(call.da, lora_a, strict=need_da)],
            [g.to(b.dtype) for g, b in zip(call.db, lora_b, strict=need_db)],
        )

    def _plan(self, segments: Tensor, x: Tensor, lora_a: Sequence[Tensor]) -> Plan:
        return self._plans.get(segments, PlanSizes(x.shape[0], segments.shape[0], len(lora_a)))


class _Forward:
    """One forward call; a method is a launch."""

    plan: Plan
    dropout: Dropout | None

    def __init__(
        self,
        kernels: LaunchKernels,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Sequence[Tensor],
        lora_b: Sequence[Tensor],
        scaling: Tensor,
    ) -> None:
        self.kernels, self.x, self.weight, self.bias, self.scaling = kernels, x, weight, bias, scaling
        self.a = factors_of(lora_a, transposed=False)
        self.b = factors_of(lora_b, transposed=True)
        self.y = x.new_empty(x.shape[0], weight.shape[0])
        self.s = x.new_empty(x.shape[0], self.a.max_rank)
        self.partial = _partial_rows(self.s, x.shape[1])

    def shrink(self) -> None:
        self.kernels.shrink(self.x, self.a, self.plan, self.scaling, self.dropout, self.partial)

    def reduce_rows(self) -> None:
        self.kernels.reduce_rows(self.partial, self.s)

    def expand(self) -> None:
        self.kernels.expand(self.s, self.b, self.plan, self.bias, self.y)

    def base_gemm(self) -> None:
        self.y.addmm_(self.x, self.weight.t())


class _Backward:
    """One backward call; a method is a launch."""

    plan: Plan
    dropout: Dropout | None

    def __init__(
        self,
        kernels: LaunchKernels,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        lora_a: Sequence[Tensor],
        lora_b: Sequence[Tensor],
        s: Tensor,
        scaling: Tensor,
        wanted: tuple[bool, bool, bool],
    ) -> None:
        self.kernels, self.dy, self.x, self.weight, self.s = kernels, dy, x, weight, s
        self.scaling, self.wanted = scaling, wanted
        need_dx, need_da, need_db = wanted
        self.a = factors_of(lora_a, transposed=False)
        self.b = factors_of(lora_b, transposed=True)
        self.dx = x.new_empty(x.shape) if need_dx else None
        self.da_buffer, self.da = self.a.gradients(need_da)
        self.db_buffer, self.db = self.b.gradients(need_db)
        self.ds = x.new_empty(x.shape[0], self.a.max_rank)
        self.partial_ds = _partial_rows(self.ds, dy.shape[1])

    def launches(self) -> list[str]:
        need_dx, need_da, need_db = self.wanted
        return backward_launches(
            self.dy.shape[1],
            need_dx=need_dx,
            need_da=need_da,
            need_db=need_db,
            rows=self.plan.sizes.rows,
        )

    def read_dy(self) -> None:
        need_dx, need_da, need_db = self.wanted
        self.partial_db = self._partial_gradient(self.b, need_db)
        self.kernels.read_dy(
            self.dy,
            self.s,
            self.b,
            self.plan,
            self.scaling,
            self.partial_ds if need_dx or need_da else None,
            self.db_buffer if need_db else None,
            self.partial_db,
        )

    def reduce_rows(self) -> None:
        self.kernels.reduce_rows(self.partial_ds, self.ds)

    def read_x(self) -> None:
        need_da = self.wanted[1]
        self.partial_da = self._partial_gradient(self.a, need_da)
        self.kernels.read_x(
            self.x,
            self.ds,
            self.a,
            self.plan,
            self.dropout,
            self.dx,
            self.da_buffer if need_da else None,
            self.partial_da,
        )

    def base_gemm(self) -> None:
        assert self.dx is not None
        self.dx.addmm_(self.dy, self.weight)

    def reduce_da(self) -> None:
        self.kernels.reduce_gradients(self.partial_da, self.a, self.plan, self.da_buffer)

    def reduce_db(self) -> None:
        self.kernels.reduce_gradients(self.partial_db, self.b, self.plan, self.db_buffer)

    def _partial_gradient(self, factors: Factors, wanted: bool) -> Tensor:
        slots = self.plan.sizes.slots if wanted else 0
        return torch.empty(slots, factors.max_rank, factors.width, dtype=torch.float32, device=self.x.device)


def _partial_rows(out: Tensor, width: int) -> Tensor:
    """Where a product over `width` columns goes: the result itself, or fp32 sums of its column splits."""
    splits = column_splits(width)
    return out if splits == 1 else torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device)


def _dropout(p: Tensor | None, rng: Tensor | None, layer: Tensor | None) -> Dropout | None:
    if p is None or rng is None or layer is None:
        return None
    return p, rng, layer


def _one_dtype(matrices: Sequence[Tensor]) -> Sequence[Tensor]:
    """The kernels read one dtype for all; where adapters differ, in fp32, which holds them all."""
    if all(matrix.dtype == matrices[0].dtype for matrix in matrices):
        return matrices
    return [matrix.float() for matrix in matrices]
