"""A folder for the user that appears whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlora.durable import sync_path
from mlora.errors import RunError, first_line
from mlora.store.disk import lock, os_errors, remove


def check_new(folder: Path, option: str) -> None:
    """Raises RunError if a folder cannot be made: it holds something, or a file has its name.

    `option` is what the user gave it with.
    """
    with os_errors(f"{option}: {folder} cannot be read"):
        if folder.is_dir():
            if any(folder.iterdir()):
                raise RunError(f"{option}: {folder} is not empty; remove it, or choose another folder")
        elif folder.exists() or folder.is_symlink():
            raise RunError(f"{option}: {folder} is a file; give a folder")


@contextmanager
def new_folder(folder: Path, option: str) -> Iterator[Path]:
    """Yields a scratch folder beside `folder`, which becomes it if the block ends without an error.

    An error removes the scratch folder, and the parents that were made for it. What a killed process has left
    is removed by the next one. Raises RunError as `check_new`, if another process is writing the folder, or
    if the disk is full. A file system without locks does not keep two processes apart.
    """
    check_new(folder, option)
    scratch = folder.with_name(f".{folder.name}.unfinished")
    made = [parent for parent in folder.parents if not parent.exists()]
    with _disk_errors(f"{option}: {folder} cannot be written"):
        scratch.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():  # its owner could put links there
                raise RunError(f"{option}: {scratch} is another user's; choose another folder")
            if lock(descriptor, fcntl.LOCK_EX) is False:
                raise RunError(f"{option}: another process is writing {folder}; wait for it")
            try:
                for left in scratch.iterdir():
                    remove(left)
                yield scratch
                for path in (*sorted(scratch.rglob("*")), scratch):
                    sync_path(path)
                check_new(folder, option)
                os.replace(scratch, folder)  # also over an empty folder
                sync_path(folder.parent)
            finally:
                if scratch.is_dir() and os.path.samestat(os.fstat(descriptor), scratch.stat()):
                    shutil.rmtree(scratch, ignore_errors=True)
        finally:
            os.close(descriptor)
            if not folder.exists():
                _remove_empty(made)


def _remove_empty(folders: Iterable[Path]) -> None:
    """Removes folders, the innermost first, up to one that holds something."""
    with suppress(OSError):
        for each in folders:
            each.rmdir()


@contextmanager
def _disk_errors(what: str) -> Iterator[None]:
    """Raises a RunError ``{what}: {reason}`` where the system or safetensors cannot write."""
    from safetensors import SafetensorError  # imports torch's format only when it is used

    try:
        with os_errors(what):
            yield
    except SafetensorError as error:
        full = "No space left on device" in str(error)
        raise RunError(f"{what}: {os.strerror(errno.ENOSPC) if full else first_line(error)}") from error
