"""What of a model is out of memory, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLOTS = 3
"""Blocks in memory: the one in use, the next one, and one that stays at the turn."""


@dataclass(frozen=True)
class OffloadOptions:
    """Where parts of a model live while they are not used.

    Attributes:
        base: `device` or `host` (in memory; on a CPU they are the same), or `disk`: the blocks' linear
            weights are read when they are used.
        optimizer: where the optimizer's states are, likewise; only if all weights are trained.
        activations: of the blocks, between forward and backward: `keep`, `recompute`, `swap` to disk, or
            `auto`: for each block what a plan says (see `mlora.offload.planner`).
        folders: for scratch files, which are striped over them; empty: the system's folder for temporary
            files.
        slots: how many blocks are in memory at once.
        device_memory: bytes that a plan may use, all memory of the process together; None = what is free.
        rate: bytes per second of all transfers together, a stand-in for a slower disk; 0 = no bound.
        poison: overwrite memory with NaN when its block leaves, so that a use after that shows; for tests.
    """

    base: str = "device"
    optimizer: str = "device"
    activations: str = "keep"
    folders: Sequence[str] = ()
    slots: int = SLOTS
    device_memory: int | None = None
    rate: float = 0.0
    poison: bool = False


IN_MEMORY = OffloadOptions()
