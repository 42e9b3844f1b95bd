"""Writes files that are whole or not there, and waits until files and their names are on the disk.

A new file is written under a name that nobody can foresee and that must not be there yet. So a link that
somebody put into a run's folder is never written through.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import IO

NOT_SERVED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
"""Errors of file systems that have no locks, or cannot say when names are on the disk."""


def temporary(path: Path) -> Path:
    """Returns a new name for a file or folder in the making; `TEMPORARY` of a run's folder knows it again."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def write_whole(path: Path, content: bytes | Callable[[IO[bytes]], object]) -> None:
    """Writes bytes, or what a function writes, durably. Raises OSError.

    The old file stays until the new one is whole. A failure leaves nothing behind.
    """
    scratch = temporary(path)
    try:
        with open(scratch, "xb") as file:
            file.write(content) if isinstance(content, bytes) else content(file)
            file.flush()
            sync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    sync_path(path.parent)


def sync(descriptor: int) -> bool:
    """Waits until an open file, or the names in a folder, are on the disk. Raises OSError.

    Returns False if the file system cannot do that, as some network file systems cannot for folders.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_SERVED:
            raise
        return False
    return True


def sync_path(path: Path) -> bool:
    """Does `sync` with the file or folder at `path`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return sync(descriptor)
    finally:
        os.close(descriptor)
