"""What a layer with adapters must compute and move at least, and how long that takes at measured speeds.

Letters: T rows, D = d_in, O = d_out; adapter i has T_i rows and rank r_i.

Bytes are those of kernels beside the base GEMM: each tensor that an operator needs is read or written once
by it. That the base GEMM then reads y and dx once more, to add to them, is not counted: on an H100 it takes
no longer for it (docs/dev/gpu.md). A kernel that reads x inside the base GEMM would move less; nothing here
assumes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from shared.timing import median_seconds

from mlora_ext.frozen import base_gemm as gemm


@dataclass(frozen=True)
class Work:
    """FLOPs (a multiplication and an addition are two) and bytes between memory and processor."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def times(self, count: int) -> Work:
        """The work of so many of these."""
        return Work(self.flops * count, self.bytes * count)


@dataclass(frozen=True)
class Ceilings:
    """Speeds that this machine was seen to reach in this run.

    Attributes:
        bytes_per_second: read and written by a copy that no cache holds.
        flops_per_second: of a large GEMM.
    """

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, work: Work) -> float:
        """The least time: `max(bytes / bandwidth, FLOPs / rate)`."""
        return max(work.bytes / self.bytes_per_second, work.flops / self.flops_per_second)

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def frozen_forward(rows: int, d_in: int, d_out: int, element: int) -> Work:
    """`x Wᵀ`: x and W read, y written; `element` is the bytes of one."""
    return Work(2.0 * rows * d_in * d_out, float(element * (rows * d_in + d_in * d_out + rows * d_out)))


def frozen_backward(rows: int, d_in: int, d_out: int, element: int) -> Work:
    """`dy W`: dy and W read, dx written."""
    return frozen_forward(rows, d_out, d_in, element)


def frozen(rows: int, d_in: int, d_out: int, element: int) -> Work:
    """Forward and dX of the layer without adapters."""
    return frozen_forward(rows, d_in, d_out, element) + frozen_backward(rows, d_in, d_out, element)


def low_rank_forward(
    lengths: Sequence[int], ranks: Sequence[int], d_in: int, d_out: int, element: int
) -> Work:
    """`y += s Bᵀ`, `s = x Aᵀ`: x, A and B read, s written and read, y written."""
    rows, inner = sum(lengths), _inner(lengths, ranks)
    moved = rows * (d_in + d_out) + 2 * inner + sum(ranks) * (d_in + d_out)
    return Work(2.0 * inner * (d_in + d_out), float(element * moved))


def low_rank_backward(
    lengths: Sequence[int], ranks: Sequence[int], d_in: int, d_out: int, element: int
) -> Work:
    """`ds = dy B`, `dB = dyᵀ s`, `dA = dsᵀ x`, `dx += ds A`.

    dy, x, s, A and B read, ds written and read, dx, dA and dB written.
    """
    rows, inner = sum(lengths), _inner(lengths, ranks)
    moved = rows * (d_out + 2 * d_in) + 3 * inner + 2 * sum(ranks) * (d_in + d_out)
    return Work(4.0 * inner * (d_in + d_out), float(element * moved))


def low_rank(lengths: Sequence[int], ranks: Sequence[int], d_in: int, d_out: int, element: int) -> Work:
    """Forward and backward of the low-rank part."""
    sizes = (lengths, ranks, d_in, d_out, element)
    return low_rank_forward(*sizes) + low_rank_backward(*sizes)


def _inner(lengths: Sequence[int], ranks: Sequence[int]) -> int:
    """Elements of s: the sum of T_i r_i."""
    return sum(length * rank for length, rank in zip(lengths, ranks, strict=True))


def measure_ceilings(device: torch.device | str, dtype: torch.dtype, quick: bool = False) -> Ceilings:
    """Measure both speeds here and now."""
    return Ceilings(copy_speed(device, 4 if quick else 256), gemm_speed(device, dtype, quick))


def copy_speed(device: torch.device | str = "cpu", mebibytes: int = 256) -> float:
    """Bytes read and written per second by a copy of so many MiB: the median of five."""
    source, target = torch.ones(2, mebibytes * 2**18, device=device).unbind()
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), source.device)


def gemm_speed(device: torch.device | str, dtype: torch.dtype, quick: bool = False) -> float:
    """FLOPs per second of the frozen product, by the library that mlora_ext chose: the best of its sizes."""
    place = torch.device(device)
    sizes = [256] if quick else [4096, 8192] if place.type == "cuda" else [1024, 2048]
    best = 0.0
    for size in sizes:
        x, weight = torch.randn(2, size, size, device=place).to(dtype).unbind()
        seconds = median_seconds(lambda x=x, weight=weight: gemm.linear(x, weight), place)  # type: ignore[misc]
        best = max(best, 2 * size**3 / seconds)
    return best
