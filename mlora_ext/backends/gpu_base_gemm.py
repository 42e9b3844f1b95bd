"""Who makes the frozen products of the backend `cuda`: cuBLAS, or a kernel with the low-rank part inside.

That kernel (csrc/cuda/hopper_product.cuh) runs on sm_90. Which is faster depends on the shape, so each shape
is measured once, at its first call; a process may be given what another one has measured.

Letters: T rows, D = d_in, O = d_out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Library = Literal["cublas", "mlora"]
GROUPS = (4, 8, 16)
"""Row tiles that stay together, of which the fastest is taken: csrc/cuda/hopper_product.h."""
FEWEST_ROWS, MOST_ROWS = 512, 16384
"""Fewer rows do not fill a GPU with tiles of 128 x 256: cuBLAS multiplies them. More count as so many."""
_ROUNDS, _CALLS = 3, 3
OPS = torch.ops.mlora_ext


class Shape(NamedTuple):
    """One product of one layer.

    Attributes:
        direction: `forward` or `backward`.
        dtype: such as `bfloat16`.
        rows: T, rounded up to a power of two.
        d_in: D.
        d_out: O.
    """

    direction: str
    dtype: str
    rows: int
    d_in: int
    d_out: int


Times = dict[int, float]
"""Seconds by group; 0 stands for cuBLAS."""
Trial = Callable[[Shape, torch.device], Callable[[int], object]]
"""Returns a call of one shape with numbers of its own, by group."""


class GpuBaseGemm:
    """The choice of one process.

    Args:
        trial: see `Trial`.

    Attributes:
        library: that is forced; None: the faster one.
        times: what was measured.
    """

    def __init__(self, trial: Trial) -> None:
        self.library: Library | None = None
        self.times: dict[Shape, Times] = {}
        self._trial, self._lock = trial, threading.Lock()

    def group(self, direction: str, x: Tensor, weights: Sequence[Tensor]) -> int:
        """Returns the group of row tiles for own products of layers that share x `[T, D]`; 0: cuBLAS."""
        if not weights or x.element_size() != 2 or self.library == "cublas" or not _serves(x.device):
            return 0
        if self.library == "mlora":
            return GROUPS[1]
        if not x.is_cuda or len(x) < FEWEST_ROWS:
            return 0
        rows = min(1 << (len(x) - 1).bit_length(), MOST_ROWS)
        dtype = str(x.dtype).removeprefix("torch.")
        shapes = [Shape(direction, dtype, rows, w.shape[1], w.shape[0]) for w in weights]
        if any(shape not in self.times for shape in shapes):
            if torch.cuda.is_current_stream_capturing():
                return 0
            self.measure(shapes, x.device)
        return faster([self.times[shape] for shape in shapes])

    def measure(self, shapes: Sequence[Shape], device: torch.device) -> None:
        """Measures shapes that are not known; one that does not fit into memory stays with cuBLAS."""
        with self._lock:
            for shape in shapes:
                if shape not in self.times:
                    self.times[shape] = self._measured(shape, device)

    def _measured(self, shape: Shape, device: torch.device) -> Times:
        try:
            return _best(self._trial(shape, device), device)
        except torch.cuda.OutOfMemoryError:
            return {0: 0.0}


@cache
def _serves(device: torch.device) -> bool:
    """Whether a device has own products."""
    return OPS.cuda_has_own_products.default(torch.empty(0, device=device))  # type: ignore[no-any-return]


def faster(times: Sequence[Times]) -> int:
    """Returns the group with the least time for several products; cuBLAS if as fast."""
    known = [group for group in times[0] if all(group in one for one in times)]
    return min(known, key=lambda group: sum(one[group] for one in times))


def _best(run: Callable[[int], object], device: torch.device) -> Times:
    """Returns the least seconds of a call, of rounds in which all take turns."""
    best = dict.fromkeys((0, *GROUPS), float("inf"))
    with torch.cuda.device(device):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for turn in range(_ROUNDS + 1):
            for group in best:
                begun.record()
                for _ in range(_CALLS):
                    run(group)
                ended.record()
                ended.synchronize()
                if turn:  # the first loads kernels
                    best[group] = min(best[group], begun.elapsed_time(ended) / 1e3 / _CALLS)
    return best
