"""The kernels that a GPU backend provides; docs/gpu.md describes each launch."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .factors import Factors
from .plan import Plan, PlanSizes

Dropout = tuple[Tensor, Tensor, Tensor]
"""`dropout_p [N]` fp32, `dropout_rng [N, 2]` int64, `layers [L]` int64."""


class LaunchKernels(Protocol):
    """One backend's launches. Every output is memory that the caller has made.

    Letters: T rows, d = D or O columns, R largest rank, N adapters, L layers that share x.
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
        """`out [L, T, R]` in the dtype of rows, or fp32 `[column splits, L, T, R]`."""

    def reduce_rows(self, partial: Tensor, out: Tensor) -> None:
        """`out [L, T, R] = sum of partial [column splits, L, T, R]`."""

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
        add: bool,
    ) -> None:
        """`ds` as `out` of shrink, with L = 1, and the gradients of B; either may be unwanted.

        `partial [slots, R, d]`; with `add`, gradients are added to what `gradient` holds.
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
        add: bool,
    ) -> None:
        """`dx [T, d]`: the sum of `drop'(ds F)` over layers, and the gradients of A; either may be unwanted.

        `ds [L, T, R]`, `partial [L slots, R, d]`; with `add`, gradients are added to what `gradient` holds.
        """

    def reduce_gradients(
        self, partial: Tensor, factors: Factors, plan: Plan, gradient: Tensor, add: bool
    ) -> None:
        """Sums of the slots of every adapter that has any, for each layer of `factors`."""
