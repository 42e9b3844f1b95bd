"""Block sizes, warps and pipeline stages of every kernel, by architecture and element size.

Chosen by the compiler's reports (no spills), not by time: nothing has run on a GPU yet. No kernel is tuned
during a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..gpu.plan import TILE_ROWS

DEFAULT = "sm_80"


@dataclass(frozen=True)
class Config:
    """How one kernel is compiled.

    Attributes:
        columns: columns of d that one step of a sum, or one program, takes.
        stages: depth of the software pipeline.
        rows: rows of a tile that a gradient takes at a time; few where a product is held in registers.
        gradient_columns: columns of dy that a program of `read_dy` takes for dB.
    """

    columns: int
    warps: int = 4
    stages: int = 3
    rows: int = TILE_ROWS
    gradient_columns: int = 128


_HALF = {
    "shrink": Config(64, 4, 4),
    "expand": Config(128, 4, 2),
    "read_dy": Config(64, 4, 3),
    "read_x": Config(64, 4, 3),
}
_FLOAT = {
    "shrink": Config(32, 8, 2),
    "expand": Config(32, 8, 1),
    "read_dy": Config(32, 8, 2, rows=16, gradient_columns=64),
    "read_x": Config(64, 8, 2, rows=16),
}
_TABLE = {
    ("sm_80", 2): _HALF | {"read_x": Config(32, 4, 3)},
    # eight warps leave eight bytes in local memory: with two stages in Triton 3.6, with three in 3.9
    ("sm_80", 4): _FLOAT | {"shrink": Config(32, 4, 2)},
    ("sm_90", 2): _HALF,
    ("sm_90", 4): _FLOAT,
}
REDUCE_ROWS, REDUCE_RANKS, REDUCE_COLUMNS = 64, 16, 128


def config(kernel: str, architecture: str, element_size: int) -> Config:
    """Returns a kernel's configuration; an architecture without a table of its own takes that of sm_80."""
    table = _TABLE.get((architecture, element_size)) or _TABLE[DEFAULT, element_size]
    return table[kernel]
