"""Copies small tables to a device without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(table: Tensor, device: torch.device) -> Tensor:
    """Returns a CPU tensor on a device; a copy to a GPU is queued and waits for nothing."""
    if device.type != "cuda":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)
