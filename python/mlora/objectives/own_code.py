"""Keeps code of users, such as losses and callbacks, from disturbing the adapters of others.

Such code runs in the process that trains all adapters. It may raise anything, and it may change settings of
torch that the results of all adapters depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def is_own_failure(error: BaseException) -> bool:
    """Whether users' code has failed: not Ctrl-C, nor a signal's handler (a kind of SystemExit)."""
    return type(error) is SystemExit or not isinstance(error, KeyboardInterrupt | SystemExit)


_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "set_num_threads": (torch.get_num_threads, torch.set_num_threads),
    "set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "set_default_device": (
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    "set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "use_deterministic_algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "set_float32_matmul_precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "set_autocast_enabled": (
        lambda: [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
        lambda found: [torch.set_autocast_enabled(*one) for one in zip(("cpu", "cuda"), found, strict=True)],
    ),
    # Python's own arithmetic obeys it, too; torch has no function that reads it
    "set_flush_denormal": (lambda: float.fromhex("0x1p-1074") * 1.0 == 0.0, torch.set_flush_denormal),
}
"""How to read and to set what torch computes with in this thread, by the function that sets it."""


class TorchSettings:
    """Torch's settings in this thread, as they are when it is made."""

    def __init__(self) -> None:
        self._found = {name: read() for name, (read, _) in _SETTINGS.items()}

    def put_back(self) -> str:
        """Puts back what was changed since then; returns what to say of it, or nothing."""
        changed = [name for name, (read, _) in _SETTINGS.items() if read() != self._found[name]]
        for name in changed:
            _SETTINGS[name][1](self._found[name])
        which = ", ".join(f"torch.{name}" for name in changed)
        return f"it changes {which} for all adapters; remove that" if changed else ""
