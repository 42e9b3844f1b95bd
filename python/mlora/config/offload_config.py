"""The model of ``offload`` in a run's config: what is out of memory while it is not used, and where."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mlora.config.sections import Size, parse_size
from mlora.config.strict import MOST, ResolvedPath, Strict
from mlora.offload.options import SLOTS, OffloadOptions

Method = Literal["lora", "full"]
Place = Literal["device", "host", "disk"]
"""The memory of the device that computes, the machine's memory (on a CPU the same), or files."""


class OffloadConfig(Strict):
    """Where parts of a run live while they are not used. No choice changes a result.

    ``base``: with ``disk``, the linear weights of the base model's blocks stay in files, and ``slots`` blocks
    at a time are in memory. ``optimizer``: the optimizer's states. ``activations``: what a block keeps for
    backward. Scratch files are striped over ``folders``; without any they are in the system's folder for
    temporary files. ``host_memory`` and ``device_memory`` bound what a plan may use.
    """

    base: Place = Field(
        default="device",
        description="Where the linear weights of the blocks are; `host` on a CPU is the same as `device`.",
    )
    optimizer: Place = Field(
        default="device", description="Where the optimizer's states are; `disk` needs `method: full`."
    )
    activations: Literal["auto", "keep", "recompute", "swap"] = Field(
        default="keep",
        description="What becomes of what a block needs for backward; `auto` plans it for each block.",
    )
    folders: list[ResolvedPath] = Field(
        default_factory=list,
        description="Folders for scratch files, which are striped over them; they must exist; empty: the "
        "system's folder for temporary files.",
    )
    host_memory: Size | None = Field(
        default=None,
        description="Most memory of the machine that a plan of `activations: auto` may use; null: what is"
        " free.",
    )
    device_memory: Size | None = Field(
        default=None,
        description="Most memory of the device that a plan of `activations: auto` may use; null: what is "
        "free.",
    )
    slots: int = Field(
        default=SLOTS, ge=2, le=MOST, description="Blocks in memory at once with `base: disk`."
    )

    @property
    def options(self) -> OffloadOptions:
        """The same for an `Engine`."""
        return OffloadOptions(
            base=self.base,
            optimizer=self.optimizer,
            activations=self.activations,
            folders=tuple(self.folders),
            slots=self.slots,
            device_memory=self.device_bytes,
        )

    @property
    def device_bytes(self) -> int | None:
        """``device_memory`` in bytes; on a CPU, where both are one memory, the smaller of both."""
        given = [parse_size(size) for size in (self.device_memory, self.host_memory) if size is not None]
        return min(given, default=None)
