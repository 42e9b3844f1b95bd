"""Files that are either whole or not there, and durable; the system's errors as `RunError`."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from mlora.durable import NOT_SERVED, sync_path, write_whole
from mlora.errors import RunError
from mlora.regular_files import open_regular

_PIECE = 1 << 20  # bytes of one read
_NOT_A_FILE = (
    "is a link or no regular file; a run writes only into its own folder, so put the file itself there"
)


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
    """Does `write_whole`; RunError if the file cannot be written."""
    with os_errors(f"{path}: cannot be saved"):
        write_whole(path, content)


def open_appended(path: Path) -> IO[bytes]:
    """Opens a file for appending, and makes it if it is missing. Raises OSError.

    RunError if it is a link or no regular file: a run writes into its own folder only.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

    try:
        file = open(path, "ab", buffering=0, opener=opener)  # noqa: SIM115 - the caller closes it
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link; a pipe that nobody reads
            raise
        raise RunError(f"{path}: {_NOT_A_FILE}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise RunError(f"{path}: {_NOT_A_FILE}")
    return file


def remove(path: Path) -> None:
    """Removes a file, a link, or a folder with all that is in it. Raises OSError."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def lock(descriptor: int, kind: int) -> bool | None:
    """Locks an open file or folder without waiting; `kind` is of `fcntl`. Raises OSError.

    Returns False if another process has locked it, None if its file system has no locks.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NOT_SERVED:
            raise
        return None
    return True


def write_tensors(path: Path, content: Mapping[str, Any]) -> None:
    """Writes plain values and tensors like `write_file`; the folder may be missing."""
    import torch

    with os_errors(f"{path}: cannot be saved"):
        if not path.parent.is_dir():
            path.parent.mkdir()  # a folder that was moved away meanwhile is not made anew
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

    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
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
    with open_regular(path) as file:
        left = os.fstat(file.fileno()).st_size if size is None else size
        while left and (piece := file.read(min(left, _PIECE))):
            found, left = zlib.crc32(piece, found), left - len(piece)
    return found
