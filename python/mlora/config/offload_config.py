"""The model of ``offload`` in a run's config: what is out of memory while it is not used, and where."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mlora.config.sections import Size, parse_size
from mlora.config.strict import MOST, Location, ResolvedPath, Strict
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

    base: Place = "device"
    optimizer: Place = "device"
    activations: Literal["auto", "keep", "recompute", "swap"] = "keep"
    folders: list[ResolvedPath] = Field(default_factory=list)
    host_memory: Size | None = None
    device_memory: Size | None = None
    slots: int = Field(default=SLOTS, ge=2, le=MOST)

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


def not_served(method: Method, offload: OffloadConfig, device: str) -> dict[Location, str]:
    """Returns, by key, why a run cannot do yet what it is told to; `device` is where it computes."""
    found: dict[Location, str] = {}
    if offload.optimizer == "disk" and method == "lora":
        found["offload", "optimizer"] = "disk serves method: full; adapters' states are small, use device"
    for key in ("host_memory", "device_memory"):
        if getattr(offload, key) is not None and offload.activations != "auto":
            found["offload", key] = "bounds what activations: auto may use; set that, or remove this key"
    for key in ("base", "optimizer") if device != "cpu" else ():
        if getattr(offload, key) != "device":
            found["offload", key] = f"{getattr(offload, key)} serves the CPU so far, got device {device}"
    return found
