"""Files and scratch files of one process, read and written by threads of their own."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import gettempdir

from mlora_ext._C import File, Ticket
from torch import Tensor

from mlora_ext import _C

THREADS = 4
"""Enough for a queue that keeps one NVMe busy with pieces of 4 MiB."""


class Disk:
    """Reads and writes buffers past the page cache where the file system allows it.

    Args:
        folders: scratch files are striped over them; default: the system's folder for temporary files.
        rate: bytes per second of all transfers together, a stand-in for a slower disk; 0 = as fast as it is.
        threads: that transfer.
    """

    def __init__(
        self, folders: Sequence[str | Path] = (), *, rate: float = 0.0, threads: int = THREADS
    ) -> None:
        if isinstance(folders, str):
            raise ValueError(f"folders: expected a list of folders, got {folders!r}")
        self.folders = [str(folder) for folder in folders] or [gettempdir()]
        self._pool = _C.Pool(threads, rate)
        self._warned = False

    @property
    def cpu_seconds(self) -> float:
        """Processor seconds that its threads have used."""
        return self._pool.cpu_seconds

    def open(self, path: str | Path) -> File:
        """Opens a file for reading; OSError names it."""
        return self._checked(File.open(str(path)))

    def scratch(self, size: int) -> File:
        """Makes a nameless file of `size` bytes in the folders; however the process ends, none of it is left.

        Raises OSError if a folder is missing or its disk lacks the room.
        """
        for folder in self.folders if not self._warned else ():
            if _is_memory(folder):
                self._warned = True
                warnings.warn(f"offload: {folder} is in memory (tmpfs); name folders on a disk", stacklevel=4)
        return self._checked(File.scratch(self.folders, size))

    def read(self, file: File, offset: int, into: Tensor, size: int | None = None) -> Ticket:
        """Starts to read into a buffer; `wait` on the result raises OSError with file, offset and cause."""
        size = into.nbytes if size is None else size
        return self._pool.read(file, offset, into.data_ptr(), size, into)

    def write(self, file: File, offset: int, content: Tensor, size: int | None = None) -> Ticket:
        """Starts to write a buffer; rounds the size up to a multiple of `ALIGN`."""
        size = content.nbytes if size is None else size
        return self._pool.write(file, offset, content.data_ptr(), size, content)

    def _checked(self, file: File) -> File:
        if not file.direct and not self._warned:
            self._warned = True
            warnings.warn(
                f"offload: {file.path} is on a file system without direct reads and writes; the page cache "
                "takes part, and its copies cost processor time",
                stacklevel=4,
            )
        return file


def _is_memory(folder: str) -> bool:
    """Whether a folder is on a file system that is in memory, as far as the system tells."""
    mounts = Path("/proc/self/mounts")
    lines = mounts.read_text().splitlines() if mounts.exists() else []
    kinds = {line.split()[1]: line.split()[2] for line in lines}
    path = Path(folder).resolve()
    nearest = next((str(place) for place in (path, *path.parents) if str(place) in kinds), "")
    return kinds.get(nearest) in ("tmpfs", "ramfs")
