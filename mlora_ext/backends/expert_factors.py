"""Tables of addresses of adapters on experts: one row for each pair of adapter and expert.

PEFT keeps all experts' A of one adapter in one matrix `[r · E, D]`, expert after expert, and all B in
`[O, r · E]`, where column `k · E + e` is column k of expert e. So a pair's matrices are strided parts.

Letters: D = d_in, O = d_out, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .factors import Factors, GradientShapes, refuse_meta

_KEPT = 256
_ALIGNMENT = 16
_MOST_ROW_BYTES = 1 << 24
_Place = tuple[int, int, int, int]
"""Offset from the first matrix, stride of the rank, stride of the columns, rows of rank: in elements."""


def expert_factors(
    matrices: Sequence[Tensor],
    experts: int,
    *,
    transposed: bool,
    gradients: Sequence[Tensor] | None = None,
) -> Factors:
    """Returns the table `[N · E, 8]` of N adapters; row `n · E + e` is adapter n on expert e.

    Args:
        matrices: A `[r_n · E, D]` of each adapter, or with `transposed` B `[O, r_n · E]`; of one dtype.
        experts: E.
        transposed: whether these are B.
        gradients: existing gradients to add to, of the same shapes and dtype. Without them,
            `Factors.new_gradients` makes a buffer; the caller clears it, since kernels add to it.
    """
    refuse_meta([True, *(not matrix.is_meta for matrix in matrices)])  # x is real
    first, rank_dim = matrices[0], int(transposed)
    size = first.element_size()
    places = _places(matrices, rank_dim, size)
    width = first.shape[1 - rank_dim]
    shapes, buffer = _buffer(places, width, transposed)
    into = buffer if gradients is None else _places(gradients, rank_dim, size)
    table, dense, alignment = _table(places, into, experts, transposed, first.device)
    ranks = [rows // experts for _, _, _, rows in places]
    near = all(stride * experts * size < _MOST_ROW_BYTES for _, stride, _, _ in places)
    aligned = dense and near and alignment * size % 16 == 0 and first.data_ptr() % 16 == 0
    return Factors(
        matrices, first, table, width, max(ranks), dense, alignment, aligned, shapes, gradients, True
    )


def expert_parts(matrix: Tensor, experts: int, *, transposed: bool) -> list[Tensor]:
    """Returns the parts `[r, D]` of A `[r · E, D]`, or with `transposed` those `[O, r]` of B `[O, r · E]`."""
    if transposed:
        return list(matrix.unflatten(1, (-1, experts)).unbind(2))
    return list(matrix.unflatten(0, (experts, -1)).unbind(0))


def _places(matrices: Sequence[Tensor], rank_dim: int, size: int) -> tuple[_Place, ...]:
    base = matrices[0].data_ptr()
    return tuple(
        (
            (matrix.data_ptr() - base) // size,
            matrix.stride(rank_dim),
            matrix.stride(1 - rank_dim),
            matrix.shape[rank_dim],
        )
        for matrix in matrices
    )


def _buffer(
    places: Sequence[_Place], width: int, transposed: bool
) -> tuple[GradientShapes, tuple[_Place, ...]]:
    """Returns shape, strides and offset of every gradient in one buffer, and their places there."""
    shapes: list[tuple[torch.Size, tuple[int, int], int]] = []
    inside: list[_Place] = []
    offset = 0
    for _, _, _, rows in places:
        shape = torch.Size((width, rows) if transposed else (rows, width))
        shapes.append((shape, (1, width) if transposed else (width, 1), offset))
        inside.append((offset, width, 1, rows))
        offset += -(-rows * width // _ALIGNMENT) * _ALIGNMENT
    return tuple(shapes), tuple(inside)


@lru_cache(maxsize=_KEPT)
@torch.inference_mode(False)
def _table(
    places: tuple[_Place, ...],
    into: tuple[_Place, ...],
    experts: int,
    transposed: bool,
    device: torch.device,
) -> tuple[Tensor, bool, int]:
    """Returns the table, whether all columns are dense, and the power of two that divides all distances."""
    starts, steps = [], []
    for (offset, stride, column, rows), (to, to_stride, to_column, _) in zip(places, into, strict=True):
        rank = rows // experts
        between, along = (1, experts) if transposed else (rank, 1)
        starts.append((offset, along * stride, column, rank, to, along * to_stride, to_column, 0))
        steps.append((between * stride, 0, 0, 0, between * to_stride, 0, 0, 0))
    start, step = (torch.tensor(rows, device="cpu").unsqueeze(1) for rows in (starts, steps))
    table = start + step * torch.arange(experts, device="cpu").view(1, -1, 1)
    alignment = _ALIGNMENT
    while any(row[i] % alignment for row in (*starts, *steps) for i in (0, 1, 4, 5)):
        alignment //= 2
    dense = all(row[2] == 1 and row[6] == 1 for row in starts)
    return table.view(-1, 8).to(device), dense, alignment
