"""Files that are either whole or not there, and durable; the system's errors as `RunError`."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from mlora.durable import sync_path
from mlora.errors import RunError

_PIECE = 1 << 20  # bytes of one read


@contextmanager
def os_errors(what: str) -> Iterator[None]:
    """Raises a RunError ``{what}: {the system's reason}`` where the block raises an OSError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch reports a failed write as a RuntimeError whose context is the system's error
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise RunError(f"{what}: {cause.strerror}") from error


def write_file(path: Path, content: bytes | Callable[[IO[bytes]], object]) -> None:
    """Writes bytes, or what a function writes, under a temporary name, makes it durable, then renames it.

    The old file stays until the new one is whole. A failure removes the temporary file.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with os_errors(f"{path}: cannot be saved"):
        try:
            with open(temporary, "wb") as file:
                file.write(content) if isinstance(content, bytes) else content(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_path(path.parent)


def write_tensors(path: Path, content: Mapping[str, Any]) -> None:
    """Writes plain values and tensors like `write_file`; the folder may be missing."""
    import torch

    with os_errors(f"{path}: cannot be saved"):
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True)
            sync_path(path.parent.parent)
    write_file(path, lambda file: torch.save(dict(content), file))


def read_tensors(path: Path, *, mmap: bool = False) -> Any:
    """Loads a file of `write_tensors` on the CPU. RunError, whose cause is the original error, if it fails.

    All of the file is compared with its checksums first. `mmap` reads tensors into memory only when they are
    used.
    """
    import torch

    with _reading(path):
        _check(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def check_tensors(path: Path) -> None:
    """Raises RunError as `read_tensors` if a file is missing or differs from its checksums."""
    with _reading(path):
        _check(path)


def _check(path: Path) -> None:
    """Raises an error unless a zip holds what was written; torch itself does not compare checksums."""
    import zipfile

    with zipfile.ZipFile(path) as archive:
        # torch takes an entry with attributes for a folder, and leaves its tensor uninitialised
        if any(entry.external_attr for entry in archive.infolist()) or archive.testzip():
            raise EOFError


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    import pickle
    from zipfile import BadZipFile

    damaged = (RuntimeError, EOFError, ValueError, pickle.UnpicklingError, BadZipFile, zlib.error)
    try:
        yield
    except (OSError, *damaged) as error:
        # EINVAL: torch seeks before the start of a file that was cut short
        named = isinstance(error, OSError) and error.errno != errno.EINVAL and error.strerror
        raise RunError(f"{path}: cannot be read: {named or 'it is damaged or incomplete'}") from error


def checksum_of(path: Path, size: int | None = None) -> int:
    """Returns the CRC-32 of a file, or of its first `size` bytes. Raises OSError."""
    found = 0
    with open(path, "rb") as file:
        left = os.fstat(file.fileno()).st_size if size is None else size
        while left and (piece := file.read(min(left, _PIECE))):
            found, left = zlib.crc32(piece, found), left - len(piece)
    return found
