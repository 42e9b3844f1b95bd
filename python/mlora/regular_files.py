"""Opens files that others wrote: regular ones, of a bounded size."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

MOST = 256 << 20
"""Bytes of a text that is read as a whole: a tokenizer's is the largest."""


def open_regular(path: Path | str, most: int | None = None, *, follow: bool = True) -> io.BufferedReader:
    """Opens a regular file for reading. A pipe would be waited for, and a device may never end.

    Args:
        path: of the file, or a link to it.
        most: the most bytes that it may have; None = any number.
        follow: whether it may be a link.

    Raises:
        OSError: it cannot be opened, is no regular file, or has more bytes; `strerror` says so.
    """
    links = 0 if follow else os.O_NOFOLLOW
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | links)
    except OSError as error:
        if links and error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a link; put the file itself there", str(path)) from error
        raise
    try:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is a pipe or a device; expected a regular file", str(path))
        if most is not None and found.st_size > most:
            said = f"has {found.st_size} bytes; at most {most} are read"
            raise OSError(errno.EFBIG, said, str(path))
        return os.fdopen(os.dup(descriptor), "rb")
    finally:
        os.close(descriptor)


def read_regular(
    path: Path | str, *, encoding: str = "utf-8", errors: str = "strict", most: int = MOST
) -> str:
    """Returns the text of a regular file; raises OSError and UnicodeDecodeError, see `open_regular`."""
    with open_regular(path, most) as file:
        return io.TextIOWrapper(file, encoding, errors).read(most)
