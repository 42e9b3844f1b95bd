"""The kernels that a GPU backend provides, and what each launch gets; docs/gpu.md describes them.

Every output is memory that the caller has made. Letters: T rows, d = D or O columns, R largest rank,
N adapters, L layers that share x.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from .factors import Factors
from .plan import Plan, PlanSizes


class Dropout(NamedTuple):
    """Dropout of all adapters in all layers.

    Attributes:
        p: `[N]` fp32.
        rng: `[N, 2]` int64: seed, step.
        layers: `[L]` int64, the index of each layer in the whole model.
    """

    p: Tensor
    rng: Tensor
    layers: Tensor


class Gradient(NamedTuple):
    """Where the gradients of factors go.

    Attributes:
        out: the buffer that the factors' table points into.
        partial: fp32 `[L slots, R, d]`, the sums of adapters that have several runs of tiles.
        add: to what `out` holds.
    """

    out: Tensor
    partial: Tensor
    add: bool


class Shrink(NamedTuple):
    """`out = scaling drop(rows) F^T` for each layer.

    Attributes:
        rows: `[T, d]`.
        factors: of L·N rows.
        plan: of the batch.
        scaling: `[N]` fp32.
        out: `[L, T, R]` in the dtype of rows, or fp32 `[column splits, L, T, R]`.
        dropout: of rows, or None.
    """

    rows: Tensor
    factors: Factors
    plan: Plan
    scaling: Tensor
    out: Tensor
    dropout: Dropout | None = None


class Expand(NamedTuple):
    """`y = bias + s F` for one layer.

    Attributes:
        s: `[T, R]`.
        factors: of N rows.
        plan: of the batch.
        bias: `[d]`, or None.
        y: `[T, d]`.
    """

    s: Tensor
    factors: Factors
    plan: Plan
    bias: Tensor | None
    y: Tensor


class ReadDy(NamedTuple):
    """ds, and the gradients of B, of one layer.

    Attributes:
        dy: `[T, d]`.
        s: `[T, R]`.
        factors: B, of N rows.
        plan: of the batch.
        scaling: `[N]` fp32.
        ds: as `out` of shrink with L = 1, or None where it is not wanted.
        gradient: of B, or None.
    """

    dy: Tensor
    s: Tensor
    factors: Factors
    plan: Plan
    scaling: Tensor
    ds: Tensor | None
    gradient: Gradient | None


class ReadX(NamedTuple):
    """`dx`, the sum of `drop'(ds F)` over layers, and the gradients of A.

    Attributes:
        x: `[T, d]`.
        ds: `[L, T, R]`.
        factors: A, of L·N rows.
        plan: of the batch.
        dropout: of x, or None.
        dx: `[T, d]`, or None where it is not wanted.
        gradient: of A, or None.
    """

    x: Tensor
    ds: Tensor
    factors: Factors
    plan: Plan
    dropout: Dropout | None
    dx: Tensor | None
    gradient: Gradient | None


class LaunchKernels(Protocol):
    """One backend's launches."""

    def plan(self, segments: Tensor, sizes: PlanSizes) -> Plan:
        """The plan's tables, made on the device."""

    def shrink(self, call: Shrink) -> None:
        """See `Shrink`."""

    def reduce_rows(self, partial: Tensor, out: Tensor) -> None:
        """`out [L, T, R] = sum of partial [column splits, L, T, R]`."""

    def expand(self, call: Expand) -> None:
        """See `Expand`."""

    def read_dy(self, call: ReadDy) -> None:
        """See `ReadDy`."""

    def read_x(self, call: ReadX) -> None:
        """See `ReadX`."""

    def reduce_gradients(self, factors: Factors, plan: Plan, gradient: Gradient) -> None:
        """Sums of the partial gradients of every adapter that has any, in each layer of `factors`."""
