"""Files that are either whole or not there, and durable; the system's errors as `RunError`."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from mlora.durable import sync_path
from mlora.errors import RunError


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

    `mmap` reads tensors only when they are used.
    """
    import pickle
    import zipfile

    import torch

    try:
        with open(path, "rb") as file:
            if not zipfile.is_zipfile(file):  # torch takes other bytes for an old format, and fails later
                raise EOFError
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        # EINVAL: torch seeks before the start of a file that was cut short
        named = isinstance(error, OSError) and error.errno != errno.EINVAL and error.strerror
        raise RunError(f"{path}: cannot be read: {named or 'it is damaged or incomplete'}") from error
