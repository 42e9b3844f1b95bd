"""Addresses of the adapters' matrices and gradients: one table per side of the layer, cached by content.

A factor is A `[r, D]` or B `[O, r]`; kernels see either as `F [r, d]` with any strides. CPU kernels read the
same tables (csrc/cpu/adapters.h).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter

import torch
from torch import Tensor

_ADDRESS, _SHAPE, _STRIDE = Tensor.data_ptr, attrgetter("shape"), Tensor.stride
_KEPT, _KEPT_OF_EXPERTS = 4096, 256
_ALIGNMENT = 16
_MOST_ROW_BYTES = 1 << 24
_captured: set[Tensor] = set()
"""Tables whose addresses stand in captured CUDA graphs; nobody tells when a graph goes."""
_Place = tuple[int, int, int, int, int]
"""Offset from the first matrix, rank, rank stride, column stride and width, in elements."""
_Addresses = tuple[tuple[int, ...], tuple[torch.Size, ...], tuple[tuple[int, ...], ...]]
GradientShapes = tuple[tuple[torch.Size, tuple[int, int], int], ...]


@dataclass(frozen=True, eq=False, slots=True)
class Factors:
    """All adapters' A, or all their B, of one layer or of several that share x, layer after layer.

    Attributes:
        matrices: one per adapter and layer; they must live until the launches that read them are enqueued.
        first: the first adapter's matrix; offsets count from its address, in elements.
        table: `[L · N, 8]` int64 on their device; columns: docs/dev/gpu.md, "Factors".
        width: d, of the first layer.
        max_rank: R.
        rows_dense: whether every column stride, also of the gradients, is 1.
        alignment: a power of two, at most 16, that divides every offset and rank stride.
        aligned: whether columns are dense and every row begins at a multiple of 16 bytes, so that it can be
            loaded 16 bytes at a time.
        shapes: shape, strides and offset in one buffer of each gradient.
        into: memory of gradients, from which the table's offsets count; the first of several existing
            gradients, or one buffer. None: gradients are not wanted.
        add: whether to add to what is there.
    """

    matrices: Sequence[Tensor]
    first: Tensor
    table: Tensor
    width: int
    max_rank: int
    rows_dense: bool
    alignment: int
    aligned: bool
    shapes: GradientShapes
    into: Sequence[Tensor] | None = None
    add: bool = False

    def new_gradients(self) -> tuple[Factors, list[Tensor]]:
        """Returns the table with memory for new gradients, and these: views with the factors' strides."""
        last_shape, _, last_offset = self.shapes[-1]
        buffer = self.first.new_empty(last_offset + last_shape.numel())
        views = [buffer.as_strided(*shape) for shape in self.shapes]
        return replace(self, into=[buffer]), views


def refuse_meta(real: Iterable[bool]) -> None:
    """Raises ValueError if some operands hold numbers and others, on the meta device, do not."""
    if len(set(real)) > 1:
        raise ValueError(
            "a weight is on the meta device, beside operands that are not: it holds no numbers, as after "
            "accelerate's offloading; load the whole model to one device"
        )


def own_gradients(matrices: Sequence[Tensor], views: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies of gradients in the dtypes of their matrices, each with memory of its own.

    A gradient that shares its buffer with others would keep all of them alive, and a compiled operator's
    results may not share memory. One launch copies many.
    """
    own = [
        torch.empty_strided(view.shape, view.stride(), dtype=matrix.dtype, device=view.device)
        for matrix, view in zip(matrices, views, strict=True)
    ]
    torch._foreach_copy_(own, list(views))
    return own


def one_dtype(matrices: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the matrices in one dtype, as the kernels read them: fp32, which holds all, if they differ."""
    if all(matrix.dtype is matrices[0].dtype for matrix in matrices):
        return matrices
    return [matrix.float() for matrix in matrices]


def factors_of(
    matrices: Sequence[Tensor], *, transposed: bool, gradients: Sequence[Tensor] | None = None
) -> Factors:
    """Returns all A `[r_i, d]`, or with `transposed` all B `[d, r_i]`; all of one dtype.

    `gradients` are existing gradients to add to, of the same shapes and dtype; offsets count from the first
    of them. Without them, offsets count in the buffer of `new_gradients`. The table is made, and copied to
    the device, once per content.
    """
    first = matrices[0]
    existing = None if gradients is None else _addresses(gradients)
    assert gradients is None or all(gradient.dtype is first.dtype for gradient in gradients)
    size, device = first.element_size(), first.device
    described = _described(_addresses(matrices), existing, transposed, size, device)
    made = Factors(matrices, first, *described, gradients, gradients is not None)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured.add(made.table)
    return made


def _addresses(matrices: Sequence[Tensor]) -> _Addresses:
    """Returns a cache key of matrices; uses `map`, since this is most of a call's work on the host."""
    return tuple(map(_ADDRESS, matrices)), tuple(map(_SHAPE, matrices)), tuple(map(_STRIDE, matrices))


@lru_cache(maxsize=_KEPT)
def _described(
    addresses: _Addresses, existing: _Addresses | None, transposed: bool, size: int, device: torch.device
) -> tuple[Tensor, int, int, bool, int, bool, GradientShapes]:
    """Returns the fields of `Factors` that follow `first`."""
    refuse_meta([True, *map(bool, addresses[0])])  # x is real
    rank_dim = 1 if transposed else 0
    key = _places(addresses, rank_dim, size)
    places = None if existing is None else _places(existing, rank_dim, size)
    table, dense, alignment, shapes = _table(key, places, transposed, device)
    near = all(place[2] * size < _MOST_ROW_BYTES for place in key)  # ranks are at 32-bit distances there
    aligned = dense and near and alignment * size % 16 == 0 and addresses[0][0] % 16 == 0
    return table, key[0][4], max(place[1] for place in key), dense, alignment, aligned, shapes


def _places(addresses: _Addresses, rank_dim: int, size: int) -> tuple[_Place, ...]:
    base = addresses[0][0]
    return tuple(
        (
            (address - base) // size,
            shape[rank_dim],
            stride[rank_dim],
            stride[1 - rank_dim],
            shape[1 - rank_dim],
        )
        for address, shape, stride in zip(*addresses, strict=True)
    )


@lru_cache(maxsize=_KEPT)
@torch.inference_mode(False)
def _table(
    key: tuple[_Place, ...],
    existing: tuple[_Place, ...] | None,
    transposed: bool,
    device: torch.device,
) -> tuple[Tensor, bool, int, GradientShapes]:
    rows, shapes, place = [], [], 0
    for index, (offset, rank, rank_stride, column_stride, width) in enumerate(key):
        shape = torch.Size((width, rank) if transposed else (rank, width))
        strides = (rank_stride, column_stride)
        # As `ops.registration.gradient_of`: a Parameter's own strides if it is transposed, else contiguous.
        lies_transposed = (strides if not transposed else strides[::-1]) == (1, shape[0])
        grad = (1, shape[0]) if lies_transposed else (shape[1], 1)
        grad_place = (place, *(grad[::-1] if transposed else grad))
        if existing is not None:
            grad_place = (existing[index][0], *existing[index][2:4])
        rows.append((offset, rank_stride, column_stride, rank, *grad_place, 0))
        shapes.append((shape, grad, place))
        place += -(-shape.numel() // _ALIGNMENT) * _ALIGNMENT
    dense = all(row[2] == 1 and row[6] == 1 for row in rows)
    alignment = _alignment(rows)
    # waits for the copy: all streams share the table, and it is made once
    return torch.tensor(rows, dtype=torch.int64, device="cpu").to(device), dense, alignment, tuple(shapes)


def _alignment(rows: Sequence[tuple[int, ...]]) -> int:
    """Returns the power of two that divides the offsets and rank strides of a table's rows."""
    alignment = _ALIGNMENT
    while any(value % alignment for row in rows for value in (row[0], row[1], row[4], row[5])):
        alignment //= 2
    return alignment


def expert_factors(
    matrices: Sequence[Tensor],
    experts: int,
    *,
    transposed: bool,
    gradients: Sequence[Tensor] | None = None,
) -> Factors:
    """Returns the table `[N · E, 8]` of N adapters on E experts; row `n · E + e` is adapter n on expert e.

    PEFT keeps all experts' A of one adapter in one matrix `[r · E, D]`, expert after expert, and all B in
    `[O, r · E]`, where column `k · E + e` is column k of expert e. So a pair's matrices are strided parts.

    Args:
        matrices: A `[r_n · E, D]` of each adapter, or with `transposed` B `[O, r_n · E]`; of one dtype.
        experts: E.
        transposed: whether these are B.
        gradients: existing gradients to add to, of the same shapes and dtype. Without them,
            `Factors.new_gradients` makes a buffer; the caller clears it, since kernels add to it.
    """
    refuse_meta([True, *(not matrix.is_meta for matrix in matrices)])  # x is real
    first, rank_dim = matrices[0], int(transposed)
    size, width = first.element_size(), first.shape[1 - rank_dim]
    places = _places(_addresses(matrices), rank_dim, size)
    shapes, buffer = _expert_buffer(places, width, transposed)
    into = buffer if gradients is None else _places(_addresses(gradients), rank_dim, size)
    table, dense, alignment = _expert_table(places, into, experts, transposed, first.device)
    largest = max(rows for _, rows, *_ in places) // experts
    near = all(stride * experts * size < _MOST_ROW_BYTES for _, _, stride, *_ in places)
    aligned = dense and near and alignment * size % 16 == 0 and first.data_ptr() % 16 == 0
    return Factors(matrices, first, table, width, largest, dense, alignment, aligned, shapes, gradients, True)


def expert_parts(matrix: Tensor, experts: int, *, transposed: bool) -> list[Tensor]:
    """Returns the parts `[r, D]` of A `[r · E, D]`, or with `transposed` those `[O, r]` of B `[O, r · E]`."""
    if transposed:
        return list(matrix.unflatten(1, (-1, experts)).unbind(2))
    return list(matrix.unflatten(0, (experts, -1)).unbind(0))


def _expert_buffer(
    places: Sequence[_Place], width: int, transposed: bool
) -> tuple[GradientShapes, tuple[_Place, ...]]:
    """Returns shape, strides and offset of every gradient in one buffer, and their places there."""
    shapes: list[tuple[torch.Size, tuple[int, int], int]] = []
    inside: list[_Place] = []
    offset = 0
    for _, rows, *_ in places:
        shape = torch.Size((width, rows) if transposed else (rows, width))
        shapes.append((shape, (1, width) if transposed else (width, 1), offset))
        inside.append((offset, rows, width, 1, width))
        offset += -(-rows * width // _ALIGNMENT) * _ALIGNMENT
    return tuple(shapes), tuple(inside)


@lru_cache(maxsize=_KEPT_OF_EXPERTS)
@torch.inference_mode(False)
def _expert_table(
    places: tuple[_Place, ...],
    into: tuple[_Place, ...],
    experts: int,
    transposed: bool,
    device: torch.device,
) -> tuple[Tensor, bool, int]:
    """Returns the table, whether all columns are dense, and the power of two that divides all distances."""
    starts, steps = [], []
    for (offset, rows, stride, column, _), (to, _, to_stride, to_column, _) in zip(places, into, strict=True):
        rank = rows // experts
        between, along = (1, experts) if transposed else (rank, 1)
        starts.append((offset, along * stride, column, rank, to, along * to_stride, to_column, 0))
        steps.append((between * stride, 0, 0, 0, between * to_stride, 0, 0, 0))
    start, step = (torch.tensor(rows, device="cpu").unsqueeze(1) for rows in (starts, steps))
    table = start + step * torch.arange(experts, device="cpu").view(1, -1, 1)
    dense = all(row[2] == 1 and row[6] == 1 for row in starts)
    return table.view(-1, 8).to(device), dense, _alignment([*starts, *steps])
