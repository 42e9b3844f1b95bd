"""What the `cuda` backend's launches must cost on an H200: bytes from shapes, instructions from machine code.

A launch takes as long as its bytes or its instructions need, whichever is more, and a gap. Instructions need
as long as on the multiprocessor that gets most of them: programs go, in their order, to the one that is free
first, and equal ones so take whole rounds. What that leaves out was seen on an H100 (docs/dev/gpu.md): the
fixed work of programs that are many and short. Bytes are those that must come from memory or go there once;
`tests/cuda/test_gpu_budget.py` compares them with what kernels read and write in the emulator.

Letters: T rows, D = d_in, O = d_out of a layer, R largest rank, N adapters, L layers that share x.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

COPY = 4.3e12
"""Bytes a second of a copy. This and `FLOPS` were measured on an H200 before, not by this repository."""
BANDWIDTH = 0.9 * COPY
"""Bytes a second of a launch: assumed."""
FLOPS = 790e12
ISSUE = 0.7 * 132 * 4 * 1.755e9
"""Instructions of warps a second: seven tenths of what 132 multiprocessors can issue."""
GAP = 1e-6
"""Seconds from one of our launches to the next."""
ADDED = 0.0
"""Share of the time of its bytes that a frozen product takes longer if it adds to what is there: on an H100
products of 8192 rows took as long either way (`bench/results/gpu-h100/launches.txt`)."""
QUARTERS, UNIT, TILE_ROWS, SPLIT_TILES, WORD_COLUMNS = 4, 128, 64, 16, 32
CLUSTER_COLUMNS, CLUSTER_RANKS, ONCE_COLUMNS = 2048, 64, 256
"""Columns of dy that a cluster of read_dy takes, the ranks, and the columns of a block."""
BLOCK_COLUMNS = 64
"""Columns of a program of expand and of read_x."""
MULTIPROCESSORS = 132
ROW, FACTOR, SUM, WORD = 2, 4, 4, 4
"""Bytes of a number of the rows (bf16), of an adapter (fp32), of a partial sum, of 32 keep bits."""


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Call:
    """Layers that share x, with the same adapters.

    Attributes:
        rows: of each adapter.
        ranks: of each adapter.
        d_in: D.
        d_outs: O of each layer.
        dropout: whether there is any.
        saves_masks: whether shrink stores the keep bits for `read_x`.
        adds: whether gradients are added to existing ones.
    """

    rows: Sequence[int]
    ranks: Sequence[int]
    d_in: int
    d_outs: Sequence[int]
    dropout: bool = True
    saves_masks: bool = False
    adds: bool = True

    @property
    def total_rows(self) -> int:
        return sum(self.rows)

    @property
    def layers(self) -> int:
        return len(self.d_outs)

    @property
    def frozen(self) -> float:
        """Seconds of the frozen forward and dX."""
        return 4 * self.total_rows * self.d_in * sum(self.d_outs) / FLOPS


class Traffic(NamedTuple):
    """Bytes of a launch: read from memory, written, and written and read again by the same launch."""

    read: int
    written: int
    again: int = 0


def _summed_columns(call: Call) -> int:
    """Returns the columns that a program of shrink sums: a quarter of them where tiles are few."""
    programs = call.layers * sum(_ceil_div(n, TILE_ROWS) for n in call.rows)
    return call.d_in if 2 * programs >= MULTIPROCESSORS else UNIT * _ceil_div(call.d_in, QUARTERS * UNIT)


def traffic(call: Call) -> dict[str, Traffic]:
    """Returns the bytes of every launch."""
    T, R, L, D = call.total_rows, max(call.ranks), call.layers, call.d_in
    outs, ranks = sum(call.d_outs), sum(call.ranks)
    s = L * T * R * ROW
    owned = list(zip(call.rows, call.ranks, strict=True))
    # up to an adapter's own rank, in sectors of 32 bytes
    s_read = L * ROW * sum(n * min(R, 16 * _ceil_div(r, 16)) for n, r in owned)
    keep = L * T * _ceil_div(D, WORD_COLUMNS) * WORD if call.dropout and call.saves_masks else 0
    a, b = L * ranks * D * FACTOR, ranks * outs * FACTOR

    def parts_of_sum() -> int:
        parts = _ceil_div(D, _summed_columns(call))
        return 2 * parts * SUM * sum(n * r for n, r in owned) if parts > 1 else 0

    def parts_of_gradient(width: int) -> int:
        runs = [_ceil_div(_ceil_div(n, TILE_ROWS), SPLIT_TILES) for n in call.rows]
        return width * SUM * sum(run * r for run, r in zip(runs, call.ranks, strict=True) if run > 1)

    def clusters_of_sum(width: int) -> int:
        clusters = _ceil_div(width, CLUSTER_COLUMNS)
        return clusters * SUM * sum(n * 8 * _ceil_div(r, 8) for n, r in owned) if clusters > 1 else 0

    parts_s = L * parts_of_sum()
    parts_dy = sum(map(clusters_of_sum, call.d_outs)) + parts_of_gradient(outs)
    parts_x = L * parts_of_gradient(D)
    return {
        "shrink": Traffic(T * D * ROW + a, s + keep + parts_s, parts_s),
        "expand": Traffic(s_read + b, T * outs * ROW),
        "read_dy": Traffic(T * outs * ROW + s_read + b + call.adds * b, s + b + parts_dy, parts_dy),
        "read_x": Traffic(
            T * D * ROW + s_read + a + call.adds * a + keep, T * D * ROW + a + parts_x, parts_x
        ),
    }


Instructions = Callable[[str, int, tuple[int, ...], bool], float]
"""Instructions of a warp for each element: of a kernel, its panel of ranks, other arguments (of read_dy_once
the width of its own ranks), and whether of a gradient's loop."""


class Cost(NamedTuple):
    """One launch, or what a frozen product takes longer.

    Attributes:
        name: of the launch.
        bytes: from and to memory.
        instructions: of a warp for each element of the rows, or None.
        seconds: as computed.
    """

    name: str
    bytes: float
    instructions: float | None
    seconds: float


def _widths(call: Call) -> list[int]:
    """Returns the width of each adapter's own ranks, which its programs take."""
    return [next(w for w in (16, 32, 64, 128) if rank <= w or w == 128) for rank in call.ranks]


def _mean(call: Call, count: Callable[[int], float]) -> float:
    """Returns the mean over all rows of a number that depends on the width of ranks."""
    return sum(n * count(w) for n, w in zip(call.rows, _widths(call), strict=True)) / call.total_rows


def _programs(call: Call, launch: str) -> Iterator[tuple[int, int]]:
    """Yields the width of ranks and the elements of each program, in the order of the launch."""
    tiles = [(w, _ceil_div(n, TILE_ROWS)) for w, n in zip(_widths(call), call.rows, strict=True)]
    splits = [
        (width, TILE_ROWS * min(SPLIT_TILES, count - first))
        for width, count in tiles
        for first in range(0, count, SPLIT_TILES)
    ]
    if launch == "shrink":
        columns = _summed_columns(call)
        for _ in range(_ceil_div(call.d_in, columns)):
            for width, count in tiles:
                yield from [(width, TILE_ROWS * columns)] * (count * call.layers)
    elif launch == "expand":
        for _ in range(sum(_ceil_div(d_out, BLOCK_COLUMNS) for d_out in call.d_outs)):
            yield from ((width, rows * BLOCK_COLUMNS) for width, rows in splits)
    elif launch == "read_dy":
        for d_out in call.d_outs:
            for width, rows in splits:
                yield from [(width, rows * ONCE_COLUMNS)] * _ceil_div(d_out, ONCE_COLUMNS)
    else:
        for width, rows in splits:
            yield from [(width, rows * BLOCK_COLUMNS)] * _ceil_div(call.d_in, BLOCK_COLUMNS)


def _issue_seconds(call: Call, launch: str, count: Callable[[int], float]) -> float:
    """Returns how long the multiprocessor issues that has most to do.

    Args:
        call: whose programs.
        launch: of them.
        count: instructions of a warp for each element, by width of ranks.
    """
    counts = {width: count(width) for width in set(_widths(call))}
    free = [0.0] * MULTIPROCESSORS
    for width, elements in _programs(call, launch):
        heapq.heapreplace(free, free[0] + counts[width] * elements)
    return max(free) * MULTIPROCESSORS / ISSUE


def _counts(call: Call, instructions: Instructions) -> dict[str, Callable[[int], float]]:
    """Returns the instructions of a warp for each element of a program, by launch and width of ranks."""
    masks = 0 if not call.dropout else 2 if call.saves_masks else 1
    at_once = min(call.layers, 3 if max(call.ranks) <= 64 else 1)

    def read_dy(width: int) -> float:
        panels, own = _ceil_div(width, CLUSTER_RANKS), min(width, CLUSTER_RANKS)
        return panels * sum(
            instructions("read_dy_once", max(own, 32), (own,), made) for made in (False, True)
        )

    return {
        "shrink": lambda width: instructions("shrink", width, (int(call.dropout), 1), False),
        "expand": lambda width: instructions("expand", width, (1,), False),
        "read_dy": read_dy,
        "read_x": lambda width: (
            instructions("read_x", width, (at_once, masks, 1), True) * call.layers / at_once
        ),
    }


def costs(call: Call, instructions: Instructions) -> list[Cost]:
    """Returns every launch of forward and backward, in order."""
    T, L, D, outs = call.total_rows, call.layers, call.d_in, sum(call.d_outs)
    counts, moved = _counts(call, instructions), traffic(call)

    def launch(name: str) -> Cost:
        size = moved[name].read + moved[name].written
        issued = _issue_seconds(call, name, counts[name])
        each = _mean(call, counts[name]) * (L if name == "shrink" else 1)
        return Cost(name, size, each, max(size / BANDWIDTH, issued) + GAP)

    def product(name: str, size: float) -> Cost:
        return Cost(name, size, None, ADDED * size / BANDWIDTH)

    return [
        launch("shrink"),
        launch("expand"),
        product("y, added to", T * outs * ROW),
        launch("read_dy"),
        launch("read_x"),
        product("dx, added to", L * T * D * ROW),
    ]


def own_costs(call: Call, instructions: Instructions) -> list[Cost]:
    """Returns every launch where own products have the low-rank parts inside (docs/gpu.md).

    They are taken to be as fast as the vendor's. Drawing masks beside their multiplications is not counted.
    read_x makes dA alone, with the instructions of `read_dy`'s gradient and those of its own masks.
    """
    T, L, D, outs = call.total_rows, call.layers, call.d_in, sum(call.d_outs)
    shrink, _, _, read_dy, read_x, _ = costs(call, instructions)
    with_masks, without = (
        _counts(one, instructions)["read_x"] for one in (call, replace(call, dropout=False))
    )
    padded = sum(16 * _ceil_div(rank, 16) for rank in call.ranks)

    def page(name: str, columns: int) -> Cost:
        size = (sum(call.ranks) * FACTOR + padded * ROW) * columns
        return Cost(name, size, None, size / BANDWIDTH + GAP)

    def each(width: int) -> float:
        return L * instructions("read_dy", width, (1,), True) + with_masks(width) - without(width)

    size = read_x.bytes - T * D * ROW
    took = max(size / BANDWIDTH, _issue_seconds(call, "read_x", each)) + GAP
    of_a = Cost("read_x, dA", size, _mean(call, each), took)
    return [shrink, page("page of B", outs), read_dy, page("page of A", L * D), of_a]


def seconds(costs: Sequence[Cost]) -> float:
    """Returns the seconds of all launches."""
    return sum(cost.seconds for cost in costs)


def ratio(calls: Sequence[Call], instructions: Instructions, *, own: bool = False) -> float:
    """Returns the time of layers with adapters to that of the frozen layers.

    Args:
        calls: of the layers.
        instructions: of the kernels.
        own: whether products are own ones, with the low-rank parts inside.
    """
    total = sum(seconds((own_costs if own else costs)(call, instructions)) for call in calls)
    return 1 + total / sum(call.frozen for call in calls)


def peers(calls: Sequence[Call]) -> dict[str, float]:
    """Returns the same ratio of other layouts, from their passes over x and y alone, in their favour.

    PEFT: each elementwise operation a pass, in forward and backward. LoRAFusion (Zhu et al., 2025): dropped x
    is written, the low-rank part is added inside the products, whose kernel is taken to be as fast as the
    vendor's. The limit: x and dy are read once, everything else happens inside the products.
    """
    frozen = sum(call.frozen for call in calls)
    passes: dict[str, Callable[[Call], float]] = {
        "PEFT": lambda c: c.layers * (11 if c.dropout else 6) * c.d_in + 10 * sum(c.d_outs),
        "LoRAFusion": lambda c: c.layers * (5 if c.dropout else 2) * c.d_in + sum(c.d_outs),
        "limit": lambda c: 2 * c.d_in + sum(c.d_outs),
    }
    return {
        name: 1 + sum(count(c) * c.total_rows * ROW for c in calls) / COPY / frozen
        for name, count in passes.items()
    }


MODELS: dict[str, list[tuple[int, tuple[int, ...]]]] = {
    "4096²": [(4096, (4096,))],
    "Llama-2-7B": [(4096, (4096,) * 3), (4096, (4096,)), (4096, (11008,) * 2), (11008, (4096,))],
    "Llama-3-70B": [
        (8192, (8192, 1024, 1024)),
        (8192, (8192,)),
        (8192, (28672,) * 2),
        (28672, (8192,)),
    ],
}
"""d_in and d_out of the layers of a decoder layer; those that share x together."""


def calls_of(model: str, rows: int, ranks: Sequence[int], *, dropout: bool, saves_masks: bool) -> list[Call]:
    """Returns the calls of one decoder layer, rows shared evenly among the adapters."""
    each = [rows // len(ranks) + (i < rows % len(ranks)) for i in range(len(ranks))]
    return [
        Call(each, ranks, d_in, d_outs, dropout, saves_masks and dropout) for d_in, d_outs in MODELS[model]
    ]
