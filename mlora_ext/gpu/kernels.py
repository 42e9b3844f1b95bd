"""The kernels that a GPU backend provides; docs/gpu.md describes each launch."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .factors import Factors
from .plan import Plan, PlanSizes

Dropout = tuple[Tensor, Tensor, Tensor]
"""`dropout_p [N]` fp32, `dropout_rng [N, 2]` int64, `layer []` int64."""


class LaunchKernels(Protocol):
    """One backend's launches. Every output is memory that the caller has made.

    Letters: T rows, d = D or O columns, R largest rank, N adapters.
    """

    def plan(self, segments: Tensor, sizes: PlanSizes) -> Plan:
        """The plan's tables, made on the device."""

    def shrink(
        self,
        rows: Tensor,
        factors: Factors,
        plan: Plan,
        scaling: Tensor,
        dropout: Dropout | None,
        out: Tensor,
    ) -> None:
        """`out [T, R]` in the dtype of rows, or fp32 `[column splits, T, R]`."""

    def reduce_rows(self, partial: Tensor, out: Tensor) -> None:
        """`out [T, R] = sum of partial [column splits, T, R]`."""

    def expand(self, s: Tensor, factors: Factors, plan: Plan, bias: Tensor | None, y: Tensor) -> None:
        """`y [T, d] = bias + s F`."""

    def read_dy(
        self,
        dy: Tensor,
        s: Tensor,
        factors: Factors,
        plan: Plan,
        scaling: Tensor,
        ds: Tensor | None,
        gradient: Tensor | None,
        partial: Tensor,
    ) -> None:
        """`ds` as `out` of shrink, and the gradients of B; either may be unwanted.

        `partial [slots, R, d]`.
        """

    def read_x(
        self,
        x: Tensor,
        ds: Tensor,
        factors: Factors,
        plan: Plan,
        dropout: Dropout | None,
        dx: Tensor | None,
        gradient: Tensor | None,
        partial: Tensor,
    ) -> None:
        """`dx [T, d] = drop'(ds F)`, and the gradients of A; either may be unwanted."""

    def reduce_gradients(self, partial: Tensor, factors: Factors, plan: Plan, gradient: Tensor) -> None:
        """Sums of the slots of every adapter that has any."""
