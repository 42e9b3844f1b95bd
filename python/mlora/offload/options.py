"""What of a model is out of memory, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLOTS = 3
"""Blocks in memory: the one in use, the next one, and one that stays at the turn."""
STATE_BYTES = 12
"""AdamW's, for each trained weight: the weight and two moments in fp32."""
UNIT = 1 << 21
"""Most numbers of a parameter whose states are read, updated and written at once: 24 MiB of states."""
BUFFERS = 3
"""Units under way at once: one is read, one updated, one written."""
WAITING = 256 << 20
"""Bytes of gradients that wait for their update at once; the backward pass waits where more come."""
PLACES = ("device", "host", "disk")
MODES = ("keep", "recompute", "swap")
"""What may become of the activations of a block."""


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

    Raises:
        ValueError: a word is unknown, or `folders` is not a list.
    """

    base: str = "device"
    optimizer: str = "device"
    activations: str = "keep"
    folders: Sequence[str] = ()
    slots: int = SLOTS
    device_memory: int | None = None
    rate: float = 0.0
    poison: bool = False

    def __post_init__(self) -> None:
        known = {"base": PLACES, "optimizer": PLACES, "activations": (*MODES, "auto")}
        for name, words in known.items():
            if getattr(self, name) not in words:
                raise ValueError(f"{name}: expected {' or '.join(words)}, got {getattr(self, name)!r}")
        if isinstance(self.folders, str):
            raise ValueError(f"folders: expected a list of folders, got {self.folders!r}")


IN_MEMORY = OffloadOptions()
