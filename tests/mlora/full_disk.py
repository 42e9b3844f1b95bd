"""A disk that is full when a run writes one of its files."""

import builtins
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlora.store.run_folder import TEMPORARY


class _Full(io.FileIO):
    """A file of which the disk takes a few bytes."""

    def write(self, data: Any) -> int:
        if self.tell() < 10:
            return super().write(bytes(data)[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill_disk(monkeypatch: pytest.MonkeyPatch, is_full: Callable[[Path], bool]) -> None:
    """Have the disk be full for those files of a run of which `is_full`, asked as each opens, says so."""

    def opened(path: Path, mode: str) -> Any:
        found = TEMPORARY.fullmatch(path.name)
        full = is_full(path.with_name(found[1] if found else path.name))
        return io.BufferedWriter(_Full(path, "x")) if full else builtins.open(path, mode)

    monkeypatch.setattr("mlora.durable.open", opened, raising=False)
