"""Fake kernels of the operators for `torch.compile` and opcheck: shapes and strides without numbers.

Each function stands for the operator of its name.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lora_linear(  # type: ignore[no-untyped-def]
    x, weight, bias, lora_a, lora_b, segments, scaling, dropout_p, dropout_rng, layer, packed
):
    """Returns empty y [rows, d_out] and s [rows, largest rank]."""
    return x.new_empty(x.shape[0], weight.shape[0]), _intermediate(x, lora_a)


def lora_linear_backward(  # type: ignore[no-untyped-def]
    dy,
    x,
    weight,
    lora_a,
    lora_b,
    s,
    segments,
    scaling,
    dropout_p,
    dropout_rng,
    layer,
    need_dx,
    need_da,
    need_db,
    packed,
):
    """Returns empty dx, or one without elements, and gradients like the matrices, where wanted."""
    dx = x.new_empty(x.shape) if need_dx else x.new_empty(0)
    return dx, *_gradients(lora_a, lora_b, need_da, need_db)


def lora_add(  # type: ignore[no-untyped-def]
    x, y, lora_a, lora_b, segments, scaling, dropout_p, dropout_rng, layer
):
    """Returns an empty s [rows, largest rank]; y is written to in place."""
    return _intermediate(x, lora_a)


def lora_add_backward(  # type: ignore[no-untyped-def]
    dy, x, dx, lora_a, lora_b, s, segments, scaling, dropout_p, dropout_rng, layer, need_da, need_db
):
    """Returns empty gradients like the matrices, where wanted; dx is written to in place."""
    return _gradients(lora_a, lora_b, need_da, need_db)


def dropout_mask(  # type: ignore[no-untyped-def]
    segments, dropout_p, dropout_rng, layer, rows, columns
):
    """Returns an empty mask [rows, columns]."""
    return segments.new_empty(rows, columns, dtype=torch.bool)


def base_linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    """Returns an empty y [rows, d_out]."""
    return x.new_empty(x.shape[0], weight.shape[0])


def base_linear_dx(dy: Tensor, weight: Tensor, packed: Tensor | None) -> Tensor:
    """Returns an empty dx [rows, d_in]."""
    return dy.new_empty(dy.shape[0], weight.shape[1])


def gradient_of(parameter: Tensor) -> Tensor:
    """Returns an empty gradient with the Parameter's strides if it is dense, else with dense rows."""
    rows, cols = parameter.shape
    strides = (1, rows) if parameter.stride() == (1, rows) else (cols, 1)
    return parameter.new_empty_strided((rows, cols), strides)


def _intermediate(x, lora_a) -> Tensor:  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], max((a.shape[0] for a in lora_a), default=0))


def _gradients(lora_a, lora_b, need_da, need_db):  # type: ignore[no-untyped-def]
    da = [gradient_of(a) for a in lora_a] if need_da else []
    return da, [gradient_of(b) for b in lora_b] if need_db else []
