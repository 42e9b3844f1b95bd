"""What kinds of adapters do to rows beside the operator: dropout before it, a scale and a shift behind it.

Each function serves the rows of all adapters in a constant number of calls.

Letters: T rows, D = d_in, O = d_out, N adapters, V rows of some adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..library import LOADED
from ..once_differentiable import once_differentiable
from .dropout import LEVELS, philox_rows
from .held import anchor


def scaled_rows(y: Tensor, scales: Tensor, shifts: Tensor | None, owners: Tensor) -> Tensor:
    """Returns `y scales[owners] + shifts[owners]`, computed in the dtype of `scales`, in that of y.

    Args:
        y: `[T, O]`.
        scales: `[N + 1, O]` fp32 or fp64; the last row, for rows without an adapter, gets no gradient.
        shifts: likewise; None = nothing is added.
        owners: `[T]` int64, indices into `scales`.
    """
    if torch.compiler.is_compiling():
        found = y * scales.index_select(0, owners)
        return (found if shifts is None else found + shifts.index_select(0, owners)).to(y.dtype)
    return _ScaledRows.apply(y, scales, shifts, owners)  # type: ignore[no-any-return, no-untyped-call]


def stacked_rows(rows: Sequence[Tensor], held: Sequence[nn.Parameter]) -> Tensor:
    """Returns vectors as a table `[N, O]`; backward adds to the gradients of `held` in one call.

    Args:
        rows: of the table.
        held: those of the rows that train. They keep their gradients, see `ops.held.keeps_gradient`.
    """
    places = [next(i for i, row in enumerate(rows) if row is one) for one in held]
    return _StackedRows.apply(anchor(), rows, held, places)  # type: ignore[no-any-return, no-untyped-call]


class _StackedRows(torch.autograd.Function):
    """`torch.stack` whose backward makes no call for each row."""

    @staticmethod
    def forward(ctx: Any, _, rows, held, places):  # type: ignore[no-untyped-def]
        ctx.held, ctx.places = held, places
        return torch.stack([row.detach() for row in rows])

    @staticmethod
    @once_differentiable(lambda ctx: ())
    def backward(ctx: Any, d_table):  # type: ignore[no-untyped-def]
        rows = d_table.unbind(0)
        torch._foreach_add_([one.grad for one in ctx.held], [rows[i] for i in ctx.places])
        return None, None, None, None


def shifted_rows(y: Tensor, shifts: Tensor, owners: Tensor) -> Tensor:
    """Returns `y + shifts[owners]` in the dtype of y; arguments as in `scaled_rows`."""
    if torch.compiler.is_compiling():
        return (y + shifts.index_select(0, owners)).to(y.dtype)
    return _ShiftedRows.apply(y, shifts, owners)  # type: ignore[no-any-return, no-untyped-call]


class _ScaledRows(torch.autograd.Function):
    """Saves y and the tables; `y * scales[owners]` would save the gathered rows, too."""

    @staticmethod
    def forward(ctx: Any, y, scales, shifts, owners):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(y, scales, owners)
        found = scales.index_select(0, owners).mul_(y)
        if shifts is not None:
            found += shifts.index_select(0, owners)
        return found.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, dy):  # type: ignore[no-untyped-def]
        y, scales, owners = ctx.saved_tensors
        dy = dy.to(scales.dtype)
        need_y, need_scales, need_shifts, _ = ctx.needs_input_grad
        d_y = (dy * scales.index_select(0, owners)).to(y.dtype) if need_y else None
        d_scales = _sums(dy * y, owners, len(scales)) if need_scales else None
        return d_y, d_scales, _sums(dy, owners, len(scales)) if need_shifts else None, None


class _ShiftedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y, shifts, owners):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(owners)
        ctx.count, ctx.dtype = len(shifts), shifts.dtype
        return shifts.index_select(0, owners).add_(y).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, dy):  # type: ignore[no-untyped-def]
        (owners,) = ctx.saved_tensors
        need_y, need_shifts, _ = ctx.needs_input_grad
        return (
            dy if need_y else None,
            _sums(dy.to(ctx.dtype), owners, ctx.count) if need_shifts else None,
            None,
        )


def _sums(rows: Tensor, owners: Tensor, count: int) -> Tensor:
    """Returns the sums of each owner's rows `[count, O]`, in the order of the rows; of the last owner zeros.

    As the gradient of an embedding: on a GPU, too, it has the same bits each time.
    """
    return torch.ops.aten.embedding_dense_backward(rows, owners, count, count - 1, False)


def dropped_rows(x: Tensor, rows: Tensor | None, keep: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x with some rows dropped, `[T, D]`, and what these rows lost, `x - drop(x) [V, D]`.

    Args:
        x: `[T, D]`.
        rows: `[V]` int64, each once; None = all.
        keep: `[V, D]` bool.
        factors: `[V, 1]` fp32 or fp64, `1 / (1 - p)` of each row.
    """
    if torch.compiler.is_compiling():
        dropped = torch.where(keep, x * factors, 0).to(x.dtype)
        return dropped, x - dropped
    return _DroppedRows.apply(x, rows, keep, factors)  # type: ignore[no-any-return, no-untyped-call]


class _DroppedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, rows, keep, factors):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(rows, keep, factors)
        given = x if rows is None else x.index_select(0, rows)
        dropped = torch.where(keep, given * factors, 0).to(x.dtype)
        return dropped if rows is None else x.index_copy(0, rows, dropped), given - dropped

    @staticmethod
    def backward(ctx: Any, dx, d_lost):  # type: ignore[no-untyped-def]
        rows, keep, factors = ctx.saved_tensors
        given = dx if rows is None else dx.index_select(0, rows)
        back = torch.where(keep, (given - d_lost) * factors, 0).to(dx.dtype).add(d_lost)
        return back if rows is None else dx.index_copy(0, rows, back), None, None, None


def keep_mask(
    segments: Tensor, dropout_p: Tensor, rng: Tensor, layer: Tensor, rows: int, columns: int
) -> Tensor:
    """Returns the operator's dropout mask for a whole plan: `[rows, columns]` bool, True where x is kept.

    The tensors are the operator's arguments. Rows without a segment are kept.
    """
    if LOADED and segments.device.type == "cpu":
        kernel = torch.ops.mlora_ext.dropout_mask.default
        return kernel(segments, dropout_p, rng, layer, rows, columns)  # type: ignore[no-any-return]
    begins, ends, adapters, row0 = segments.unbind(1)
    owners = _spread(adapters + 1, begins, ends, rows) - 1
    row = torch.arange(rows, device=segments.device) + _spread(row0 - begins, begins, ends, rows)
    seed, step = rng.index_select(0, owners.clamp_min(0)).unsqueeze(-1).unbind(1)
    levels = (dropout_p * LEVELS).round().index_select(0, owners.clamp_min(0)).where(owners >= 0, 0)
    return philox_rows(row.unsqueeze(1), columns, seed, step, layer) >= levels.unsqueeze(1)


def _spread(values: Tensor, begins: Tensor, ends: Tensor, rows: int) -> Tensor:
    """Returns `[rows]` int64: the value of the segment that a row is in, 0 outside of all segments."""
    changes = torch.zeros(rows + 1, dtype=torch.int64, device=values.device)
    changes.index_add_(0, begins, values).index_add_(0, ends, -values)
    return changes.cumsum(0)[:-1]
