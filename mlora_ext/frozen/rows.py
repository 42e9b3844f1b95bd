"""Brings rows into the layout that the compiled kernels read."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_rows(rows: Tensor) -> Tensor:
    """Returns rows `[T, D]`, copied if there are gaps between elements or, on a CPU, between 16-bit rows.

    Products of 16 bits pad their tiles. On processors with AMX, PyTorch's own `F.linear` then takes in a NaN
    beside rows of 88 columns in a wider tensor, where the next row's adapter may have put it.
    """
    dense = rows.stride(0) == rows.shape[1] or rows.device.type != "cpu" or rows.element_size() != 2
    if dense and rows.stride(1) == 1:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)  # `contiguous()` keeps a single row's stride
