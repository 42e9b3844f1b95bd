"""Who makes the frozen products of the backend `cuda`: cuBLAS, or a kernel with the low-rank part inside.

That kernel (csrc/cuda/hopper_product.cuh) runs on sm_90. Which is faster depends on the shape, so each shape
is measured once, at its first call; a process may be given what another one has measured.

Letters: T rows, D = d_in, O = d_out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

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
Record = dict[str, Any]
"""The fields of a `Shape`, and `seconds`; JSON can hold it."""
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
        if not weights or x.element_size() != 2 or self.library == "cublas" or not serves(x.device):
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

    def learn(self, known: Sequence[Record]) -> None:
        """Takes over what another process has measured, in place of what this one has."""
        self.times |= times_of(known)

    def known(self) -> list[Record]:
        """Returns all that was measured, as `learn` takes it."""
        return [
            {**shape._asdict(), "seconds": {str(group): one for group, one in times.items()}}
            for shape, times in self.times.items()
        ]

    def _measured(self, shape: Shape, device: torch.device) -> Times:
        try:
            return _best(self._trial(shape, device), device)
        except torch.cuda.OutOfMemoryError:
            return {0: 0.0}


def shapes_of(weights: Iterable[Tensor]) -> list[Shape]:
    """Returns every shape of products with plain weights `[O, D]` that is ever measured."""
    rows = [1 << i for i in range(FEWEST_ROWS.bit_length() - 1, MOST_ROWS.bit_length())]
    found = {
        Shape(
            direction, str(weight.dtype).removeprefix("torch."), count, weight.shape[1], weight.shape[0]
        ): None
        for weight in weights
        for direction in ("forward", "backward")
        for count in rows
        if weight.element_size() == 2 and weight.shape[0] % 8 == weight.shape[1] % 8 == 0
    }
    return list(found)


def times_of(known: Sequence[Record]) -> dict[Shape, Times]:
    """Returns records as times by shape; ValueError if they are none."""
    try:
        return {
            Shape(*(record[key] for key in Shape._fields)): {
                int(group): float(seconds) for group, seconds in record["seconds"].items()
            }
            for record in known
        }
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"known: expected records of measured products: {error!r}") from error


def lines(known: Sequence[Record]) -> Iterator[str]:
    """Yields who multiplies, and the time of this library's products over that of cuBLAS, for each layer."""
    said: dict[str, list[str]] = {}
    for record in sorted(known, key=lambda record: record["rows"]):
        of = f"{record['direction']} {record['d_in']} -> {record['d_out']}, {record['dtype']}"
        cublas, *own = record["seconds"].values()
        ratio = f" ({min(own) / cublas:.2f})" if own else ""
        library = "mlora" if own and min(own) < cublas else "cublas"
        said.setdefault(of, []).append(f"{library}{ratio} at {record['rows']} rows")
    for of, choices in said.items():
        yield f"{of}: {', '.join(choices)}"


@cache
def serves(device: torch.device) -> bool:
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
