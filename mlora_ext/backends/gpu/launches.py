"""The launches of one call, in order, as data: the operator runs these lists.

A call serves one layer, or several that share x. No list's length depends on the number of adapters.
Letters: T rows, D = d_in, O = d_out.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .plan import COLUMN_SPLIT


class Launch(NamedTuple):
    """One launch.

    Attributes:
        kernel: its name; `base_gemm` and `base_gemm_dx` are the frozen product, the others the backend's.
        layer: which of the layers that share x, for a kernel that serves one of them.
    """

    kernel: str
    layer: int = 0


def column_splits(width: int) -> int:
    """Returns the number of partial sums of a product over `width` columns; never a function of the batch."""
    return max(1, -(-width // COLUMN_SPLIT))


@lru_cache
def forward_launches(d_in: int, layers: int = 1) -> tuple[Launch, ...]:
    """Returns the launches of `y = x W^T + b + s B^T`, for `layers` layers that share x `[T, d_in]`."""
    each = [Launch(kernel, layer) for layer in range(layers) for kernel in ("expand", "base_gemm")]
    return Launch("shrink"), *_reduce_rows("reduce_s", d_in), *each


@lru_cache
def backward_launches(
    d_outs: tuple[int, ...], *, need_dx: bool, need_da: bool, need_db: bool, several: bool
) -> tuple[Launch, ...]:
    """Returns the launches of dx, dA and dB of every layer.

    Args:
        d_outs: O of each layer that shares x.
        several: whether an adapter may have several splits: true above `SPLIT_TILES` rows, since a tile may
            hold a single row.
    """
    need_ds = need_dx or need_da
    launches: list[Launch] = []
    for layer, d_out in enumerate(d_outs):
        launches += [Launch("read_dy", layer)] * (need_ds or need_db)
        launches += _reduce_rows("reduce_ds", d_out, layer) * need_ds
        launches += [Launch("reduce_db", layer)] * (need_db and several)
    launches += [Launch("read_x")] * need_ds
    launches += [Launch("base_gemm_dx", layer) for layer in range(len(d_outs))] * need_dx
    return *launches, *[Launch("reduce_da")] * (need_da and several)


def _reduce_rows(name: str, width: int, layer: int = 0) -> list[Launch]:
    return [Launch(name, layer)] if column_splits(width) > 1 else []
