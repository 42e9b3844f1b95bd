"""Counter-based dropout in Triton; docs/design.md gives the counter of each element."""

from __future__ import annotations

import triton
import triton.language as tl

from ..interface import PHILOX_ROUNDS

ROUNDS = tl.constexpr(PHILOX_ROUNDS)


@triton.jit
def dropout_of(adapter, p_ptr, rng_ptr, layer_ptr):
    """Returns `(seed, step, layer, threshold, keep_scale)` of one adapter.

    The threshold is `round(p * 65536)`, ties to even; the product is exact in fp32.
    """
    levels = tl.load(p_ptr + adapter) * 65536.0
    whole = tl.floor(levels)
    rest = levels - whole
    threshold = whole.to(tl.int32)
    threshold += ((rest > 0.5) | ((rest == 0.5) & (threshold % 2 == 1))).to(tl.int32)
    seed = tl.load(rng_ptr + 2 * adapter)
    step = tl.load(rng_ptr + 2 * adapter + 1)
    layer = tl.load(layer_ptr)
    keep_scale = 1.0 / (1.0 - threshold.to(tl.float32) / 65536.0)
    return seed, step.to(tl.uint32), layer.to(tl.uint32), threshold.to(tl.uint32), keep_scale


@triton.jit
def keep_mask(seed, step, layer, threshold, philox_row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns which elements of rows `philox_row + [0, ROWS)` and columns `column + [0, COLUMNS)` are kept.

    `column` is a multiple of 8; one counter serves eight columns, 16 bits each, low halves first.
    """
    zero = tl.zeros([ROWS, COLUMNS // 8], dtype=tl.uint32)
    counter = zero + (column // 8 + tl.arange(0, COLUMNS // 8)).to(tl.uint32)[None, :]
    row = zero + (philox_row + tl.arange(0, ROWS)).to(tl.uint32)[:, None]
    w0, w1, w2, w3 = tl.philox(seed, counter, row, zero + layer, zero + step, ROUNDS)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    numbers = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (ROWS, COLUMNS))
    return numbers >= threshold
