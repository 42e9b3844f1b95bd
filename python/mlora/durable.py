"""Waits until files, and the names in folders, are on the disk."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
