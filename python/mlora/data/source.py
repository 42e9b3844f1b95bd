"""Where the rows of a dataset come from: a file, a saved folder, or a dataset of the hub."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlora.data.readers import Row, given, read_rows
from mlora.errors import RunError, first_line

_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_hub_id(path: str) -> bool:
    """Whether a path may be that of a dataset of the hub: ``owner/name``, without a suffix."""
    return bool(_HUB.fullmatch(path)) and not Path(path).suffix


@dataclass(frozen=True)
class Source:
    """A file, a folder that `datasets.Dataset.save_to_disk` wrote, or a dataset of the hub.

    Attributes:
        path: of the file or folder, absolute; or the hub's ``owner/name``.
        split: of a folder with several, or of the hub's.
        subset: of the hub's, which it calls a configuration.
        revision: of the hub's: a branch, tag or commit.
        columns: fields, and the columns that hold them; other columns keep their names.
    """

    path: str
    split: str = "train"
    subset: str | None = None
    revision: str | None = None
    columns: tuple[tuple[str, str], ...] = ()

    def rows(self) -> Iterator[Row]:
        """Yields the rows, with the names of fields.

        Raises:
            RunError: they cannot be read, or a column is missing.
        """
        rows = self._of_hub() if is_hub_id(self.path) else read_rows(Path(self.path), self.split)
        yield from self._renamed(rows) if self.columns else rows

    def _renamed(self, rows: Iterator[Row]) -> Iterator[Row]:
        taken = {column for _, column in self.columns}
        for place, fields in rows:
            for name, column in self.columns:
                if column not in fields:
                    has = ", ".join(map(repr, fields)) or "no columns"
                    raise RunError(f"{place}: columns.{name}: {column!r} is missing; the row has {has}")
            rest = {key: value for key, value in fields.items() if key not in taken}
            yield place, rest | {name: fields[column] for name, column in self.columns}

    def _of_hub(self) -> Iterator[Row]:
        for number, fields in enumerate(self._loaded(), 1):
            yield f"{self.path}, row {number}", given(fields)

    def _loaded(self) -> Any:
        import datasets

        try:
            return datasets.load_dataset(self.path, self.subset, split=self.split, revision=self.revision)
        except (OSError, ValueError) as error:  # what the hub's client raises is one of both
            raise RunError(
                f"{self.path}: no such file or folder, and as a dataset of the hub it cannot be read: "
                f"{first_line(error)}"
            ) from error

    def fingerprint(self) -> str:
        """Returns what tells the rows from others: a SHA-256 of the files, or what `datasets` computes."""
        if is_hub_id(self.path):
            return str(self._loaded()._fingerprint)
        return fingerprint(self.path)

    @property
    def is_there(self) -> bool:
        """Whether the file or folder exists; the hub is not asked."""
        return is_hub_id(self.path) or os.path.exists(self.path)

    @property
    def version(self) -> tuple[int, int] | None:
        """What tells a file from one that was there before it; None of all else."""
        with suppress(OSError):
            found = os.stat(self.path)
            return found.st_mtime_ns, found.st_size
        return None

    @property
    def size(self) -> float:
        """The bytes of the file or folder; infinite for a dataset of the hub."""
        if is_hub_id(self.path):
            return float("inf")
        path = Path(self.path)
        files = path.rglob("*") if path.is_dir() else [path]
        return sum(file.stat().st_size for file in files if file.is_file())


def fingerprint(path: str | Path) -> str:
    """Returns the SHA-256 of a file, or of the files in a folder, as hexadecimal digits."""
    path = Path(path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        each = [(str(file.relative_to(path)), fingerprint(file)) for file in files]
        return hashlib.sha256(repr(each).encode()).hexdigest()
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
