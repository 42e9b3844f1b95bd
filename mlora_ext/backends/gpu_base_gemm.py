"""Who makes the frozen products of the backend `cuda`: cuBLAS, or a kernel with the low-rank part inside.

That kernel (csrc/cuda/hopper_product.cuh) is of sm_90. Which is faster depends on the shape. So `fastest`
measures each shape once, at its first call; a process may be given what another one has measured.

Letters: T rows, D = d_in, O = d_out.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..out_of_memory import is_out_of_memory

Library = Literal["cublas", "mlora", "fastest"]
DEFAULT: Library = "cublas"
"""Until the kernels of sm_90 have run on a GPU."""


class Way(NamedTuple):
    """How products are made.

    Attributes:
        group: row tiles of own products that stay together for the L2 cache; 0: cuBLAS.
        left: multiprocessors on which dA is made beside own products of backward; 0: dA comes first.
    """

    group: int
    left: int = 0


CUBLAS, USUAL = Way(0), Way(8)
WAYS = {
    "forward": (CUBLAS, Way(4), USUAL, Way(16)),
    "backward": (CUBLAS, Way(4), USUAL, Way(16), Way(8, 4), Way(8, 8), Way(8, 16)),
}
"""Those that are tried, by direction."""
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


Times = dict[Way, float]
"""Seconds of a call."""
Record = dict[str, Any]
"""The fields of a `Shape`, and `seconds`; JSON can hold it."""
Trial = Callable[[Shape, torch.device], Callable[[Way], Tensor]]
"""Returns a call of one shape with numbers of its own, which returns y or dx."""


class GpuBaseGemm:
    """The choice of one process.

    Args:
        trial: see `Trial`.

    Attributes:
        library: that multiplies.
        times: what was measured.
    """

    def __init__(self, trial: Trial) -> None:
        self.library: Library = DEFAULT
        self.times: dict[Shape, Times] = {}
        self._trial, self._lock = trial, threading.Lock()

    def way(self, direction: str, x: Tensor, weights: Sequence[Tensor]) -> Way:
        """Returns how to make the products of layers that share x `[T, D]`."""
        if not weights or x.element_size() != 2 or self.library == "cublas" or not serves(x.device):
            return CUBLAS
        if self.library == "mlora":
            return USUAL
        if not x.is_cuda or len(x) < FEWEST_ROWS or not all(map(_suits, weights)):
            return CUBLAS
        rows = min(1 << (len(x) - 1).bit_length(), MOST_ROWS)
        dtype = str(x.dtype).removeprefix("torch.")
        shapes = [Shape(direction, dtype, rows, w.shape[1], w.shape[0]) for w in weights]
        if any(shape not in self.times for shape in shapes):
            with torch.cuda.device(x.device):
                if torch.cuda.is_current_stream_capturing():
                    return CUBLAS
            self.measure(shapes, x.device)
        return faster([self.times[shape] for shape in shapes])

    @property
    def reads_dy_once(self) -> bool:
        """Whether backward takes the kernel of sm_90 that reads dy once (csrc/cuda/read_dy_once.cuh).

        No shape decides: the bits of dA and dB would depend on the other rows of a batch.
        """
        return self.library != "cublas"

    def measure(self, shapes: Sequence[Shape], device: torch.device) -> None:
        """Measures shapes that are not known; one that does not fit into memory stays with cuBLAS."""
        with self._lock:
            for shape in shapes:
                if shape not in self.times:
                    self.times[shape] = self._measured(shape, device)

    def learn(self, known: Sequence[Record]) -> None:
        """Takes over what another process has measured, in place of what this one has."""
        with self._lock:
            self.times |= times_of(known)

    def known(self, shapes: Collection[Shape]) -> list[Record]:
        """Returns what was measured of some shapes, as `learn` takes it."""
        with self._lock:
            return [
                {**shape._asdict(), "seconds": {f"{way.group},{way.left}": one for way, one in times.items()}}
                for shape, times in self.times.items()
                if shape in shapes and times[CUBLAS] > 0
            ]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _measured(self, shape: Shape, device: torch.device) -> Times:
        try:
            return _best(WAYS[shape.direction], self._trial(shape, device), device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return {CUBLAS: 0.0}  # in this process; no time, so `known` leaves it out


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
        if weight.element_size() == 2 and _suits(weight)
    }
    return list(found)


def _suits(weight: Tensor) -> bool:
    """Whether rows of W, x, y and of their gradients can begin at multiples of 16 bytes."""
    return weight.shape[0] % 8 == weight.shape[1] % 8 == 0 and weight.stride(1) == 1


def times_of(known: Sequence[Record]) -> dict[Shape, Times]:
    """Returns records as times by shape; ValueError if they are none."""
    try:
        found = {
            Shape(*(record[key] for key in Shape._fields)): {
                Way(*map(int, way.split(","))): float(seconds) for way, seconds in record["seconds"].items()
            }
            for record in known
        }
        for shape, times in found.items():
            if not {CUBLAS} <= times.keys() <= {*WAYS[shape.direction]}:
                raise ValueError(f"unknown ways {[*times]}")
            if not all(0 < seconds < float("inf") for seconds in times.values()):
                raise ValueError(f"times {[*times.values()]}")
        return found
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"known: expected records of measured products: {error!r}") from error


def lines(known: Sequence[Record]) -> Iterator[str]:
    """Yields who multiplies in each layer, and the time of a call with own products over one by cuBLAS."""
    said: dict[str, list[str]] = {}
    for record in sorted(known, key=lambda record: record["rows"]):
        of = f"{record['direction']} {record['d_in']} -> {record['d_out']}, {record['dtype']}"
        own = [seconds for way, seconds in record["seconds"].items() if way != "0,0"]
        cublas = record["seconds"]["0,0"]
        ratio = f" ({min(own) / cublas:.2f})" if own else ""
        library = "mlora" if own and min(own) < cublas else "cublas"
        said.setdefault(of, []).append(f"{library}{ratio} at {record['rows']} rows")
    for of, choices in said.items():
        yield f"{of}: {', '.join(choices)}"


@cache
def serves(device: torch.device) -> bool:
    """Whether a device has own products."""
    key = device.type.upper()
    if not torch._C._dispatch_has_kernel_for_dispatch_key("mlora_ext::cuda_has_own_products", key):
        return False
    return OPS.cuda_has_own_products.default(torch.empty(0, device=device))  # type: ignore[no-any-return]


def faster(times: Sequence[Times]) -> Way:
    """Returns the way with the least time for several products; cuBLAS if as fast."""
    known = [way for way in times[0] if all(way in one for one in times)]
    return min(known, key=lambda way: sum(one[way] for one in times))


def _best(ways: Sequence[Way], run: Callable[[Way], Tensor], device: torch.device) -> Times:
    """Returns the least seconds of a call, of rounds in which all take turns; of ways that agree only."""
    with torch.cuda.device(device):
        want = run(CUBLAS)
        best = {way: float("inf") for way in ways if way == CUBLAS or _agrees(run, way, want)}
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(_ROUNDS):
            for way in best:
                begun.record()
                for _ in range(_CALLS):
                    run(way)
                ended.record()
                ended.synchronize()
                best[way] = min(best[way], begun.elapsed_time(ended) / 1e3 / _CALLS)
    return best


def _agrees(run: Callable[[Way], Tensor], way: Way, want: Tensor) -> bool:
    """Whether a way runs and differs from cuBLAS's result by at most 1% in norm; warns if it does not."""
    try:
        error = torch.linalg.vector_norm(run(way) - want, dtype=torch.float32)
        if error <= 0.01 * torch.linalg.vector_norm(want, dtype=torch.float32):
            return True
        fault = "is wrong"
    except RuntimeError as failed:
        if is_out_of_memory(failed):
            raise
        fault = f"fails ({failed})"
    warnings.warn(
        f"the product of {list(want.shape)} with the low-rank part inside {fault} on this GPU, so cuBLAS "
        "makes it; please report this",
        stacklevel=2,
    )
    return False
