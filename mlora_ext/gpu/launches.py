"""Which kernels one layer launches, in order, as data: the operator runs these lists and nothing else.

Letters: D = d_in, O = d_out. No length depends on the number of adapters.
"""

from __future__ import annotations

from .plan import COLUMN_SPLIT, SPLIT_TILES


def column_splits(width: int) -> int:
    """Number of sums that a product over `width` columns is cut into; never a function of the batch."""
    return max(1, -(-width // COLUMN_SPLIT))


def forward_launches(d_in: int) -> list[str]:
    """Of `lora_linear`: `y = x W^T + b + s B^T`.

    Args:
        d_in: D.

    Returns:
        Names of launches; `base_gemm` is torch's.
    """
    return ["shrink", *_reduce_rows(d_in), "expand", "base_gemm"]


def backward_launches(d_out: int, *, need_dx: bool, need_da: bool, need_db: bool, rows: int) -> list[str]:
    """Of `lora_linear_backward`.

    Args:
        d_out: O.
        need_dx: whether dx is wanted.
        need_da: whether the adapters' dA are wanted.
        need_db: whether the adapters' dB are wanted.
        rows: T; with more than `SPLIT_TILES`, an adapter may have several splits.

    Returns:
        Names of launches; `base_gemm` is torch's.
    """
    need_ds = need_dx or need_da
    launches = ["read_dy"] if need_ds or need_db else []
    if need_ds:
        launches += [*_reduce_rows(d_out), "read_x"]
    if need_dx:
        launches.append("base_gemm")
    if rows > SPLIT_TILES:
        launches += ["reduce_da"] * need_da + ["reduce_db"] * need_db
    return launches


def _reduce_rows(width: int) -> list[str]:
    return ["reduce_rows"] if column_splits(width) > 1 else []
