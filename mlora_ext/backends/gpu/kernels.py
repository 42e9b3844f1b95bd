"""The launches that a GPU backend provides, and their arguments; docs/gpu.md describes them.

The caller makes the memory of every output. Letters: T rows, d = D or O columns, R largest rank, N adapters,
L layers that share x.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from ..factors import Factors
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
    """Memory for the gradients of factors.

    Attributes:
        out: the buffer that the factors' table points into.
        partial: fp32 `[L slots, R, d]`, partial sums of the adapters that have several splits.
        add: whether to add to the values in `out`.
    """

    out: Tensor
    partial: Tensor
    add: bool


class Shrink(NamedTuple):
    """Arguments of `out = scaling drop(rows) F^T`, for each layer.

    Attributes:
        rows: `[T, d]`.
        factors: a table of L·N rows.
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
    """Arguments of `y = bias + s F`, for one layer.

    Attributes:
        s: `[T, R]`.
        factors: a table of N rows.
        bias: `[d]`, or None.
        y: `[T, d]`.
    """

    s: Tensor
    factors: Factors
    plan: Plan
    bias: Tensor | None
    y: Tensor


class ReadDy(NamedTuple):
    """Arguments of the pass over dy of one layer: ds and the gradients of B.

    Attributes:
        dy: `[T, d]`.
        s: `[T, R]`.
        factors: B, a table of N rows.
        scaling: `[N]` fp32.
        ds: like `out` of `Shrink` with L = 1; None: not wanted.
        gradient: of B; None: not wanted.
    """

    dy: Tensor
    s: Tensor
    factors: Factors
    plan: Plan
    scaling: Tensor
    ds: Tensor | None
    gradient: Gradient | None


class ReadX(NamedTuple):
    """Arguments of the pass over x: `dx`, the sum of `drop'(ds F)` over layers, and the gradients of A.

    Attributes:
        x: `[T, d]`.
        ds: `[L, T, R]`.
        factors: A, a table of L·N rows.
        dropout: of x, or None.
        dx: `[T, d]`; None: not wanted.
        gradient: of A; None: not wanted.
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
        """Returns the plan's tables, made on the device."""

    def shrink(self, call: Shrink) -> None:
        """See `Shrink`."""

    def reduce_rows(self, partial: Tensor, out: Tensor) -> None:
        """Writes the sum over column splits of `partial [column splits, L, T, R]` to `out [L, T, R]`."""

    def expand(self, call: Expand) -> None:
        """See `Expand`."""

    def read_dy(self, call: ReadDy) -> None:
        """See `ReadDy`."""

    def read_x(self, call: ReadX) -> None:
        """See `ReadX`."""

    def reduce_gradients(self, factors: Factors, plan: Plan, gradient: Gradient) -> None:
        """Sums the partial gradients of every adapter that has any, in each layer of `factors`."""
