"""Out-of-core tuning: models larger than a device's memory, or than the host's."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlora.offload.offloaded_model import offloaded
    from mlora.offload.options import OffloadOptions

__all__ = ["OffloadOptions", "offloaded"]

_HOMES = {"OffloadOptions": "options", "offloaded": "offloaded_model"}


def __getattr__(name: str) -> Any:
    # a config is read without torch
    if name not in _HOMES:
        raise AttributeError(f"module 'mlora.offload' has no attribute {name!r}")
    return getattr(import_module(f"mlora.offload.{_HOMES[name]}"), name)
