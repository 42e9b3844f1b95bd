"""Where the rows of a dataset come from: a file, a folder, or a dataset of the hub."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mlora.config.dataset_config import DatasetConfig, is_hub_dataset
from mlora.data.readers import NO_VALUE, UNREAD, Row, given, named, read_columns, read_rows
from mlora.errors import RunError, first_line
from mlora.regular_files import open_regular


@dataclass(frozen=True)
class Source:
    """A file, a folder, or a dataset of the hub.

    Attributes:
        path: of the file or folder, absolute; or the hub's ``owner/name``. A folder is one that
            `datasets.Dataset.save_to_disk` wrote, or one of data files.
        split: of a folder or of the hub's; None: ``train``.
        subset: of a folder of data files or of the hub's, which it calls a configuration.
        revision: of the hub's: a branch, tag or commit.
        columns: fields, and the columns that hold them; other columns keep their names.
        streaming: the hub's files are not downloaded as a whole, and files are not read to compute a
            fingerprint.
        limit: at most so many rows are read, the first ones; None: all.
    """

    path: str
    split: str | None = None
    subset: str | None = None
    revision: str | None = None
    columns: tuple[tuple[str, str], ...] = ()
    streaming: bool = False
    limit: int | None = None

    def rows(self) -> Iterator[Row]:
        """Yields the rows, with the names of fields.

        Raises:
            RunError: they cannot be read, or a column is missing.
        """
        self._check()
        if is_hub_dataset(self.path) or os.path.isdir(self.path):
            found = self._of_datasets()
            rows: Iterator[Row] = (
                (place, given(named(place, fields, self.columns))) for place, fields in found
            )
        else:
            rows = read_rows(Path(self.path), self.columns)
        yield from islice(rows, self.limit)

    def _check(self) -> None:
        """Refuses what would be ignored. Raises RunError."""
        known = {"split": self.split, "subset": self.subset, "revision": self.revision}
        if not is_hub_dataset(self.path):
            folder = os.path.isdir(self.path)
            for key in ("revision",) if folder else known:
                if known[key] is not None:
                    where = "the hub" if folder else "folders and of the hub"
                    raise RunError(f"{self.path}: {key} is for datasets of {where}; remove it")
        if os.path.isdir(self.path):
            for file in self._files():
                if file.exists() and not (file.is_file() or file.is_dir()):
                    raise RunError(f"{file}: is a pipe or a device; expected a regular file")

    def _of_datasets(self) -> Iterator[Row]:
        loaded, number = self._loaded(), 0
        names = loaded.column_names or ()  # with `streaming`, they may be unknown
        if wanted := read_columns(names, self.columns):
            loaded = loaded.select_columns(wanted)
        unread = dict.fromkeys(names, UNREAD)
        with self._faults():  # with `streaming`, files are read here
            try:
                for number, fields in enumerate(loaded, 1):
                    yield f"{self.path}, row {number}", unread | fields
            except (UnicodeDecodeError, OverflowError) as error:
                where = f"{self.path}, row {number + 1}: {_unheld(loaded, number, wanted)}"
                raise RunError(f"{where} cannot be read: {first_line(error)}") from error

    def _loaded(self) -> Any:
        import datasets
        from transformers.utils import logging

        if not (logging.is_progress_bar_enabled() or sys.stderr.isatty()):
            datasets.disable_progress_bars()  # the command line has done so for Transformers
        how = {"split": self.split or "train", "revision": self.revision, "streaming": self.streaming}
        with self._faults():
            if not any(os.path.isfile(os.path.join(self.path, name)) for name in _SAVED):
                return datasets.load_dataset(self.path, self.subset, **how)
            found = datasets.load_from_disk(self.path)
        return self._split_of(found)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Reports what `datasets` raises as a RunError of one line."""
        import datasets

        try:
            yield
        except RunError:
            raise
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            folder = os.path.isdir(self.path)
            what = "as a folder of data files" if folder else "no such file or folder, and on the hub"
            reasons = dict.fromkeys(_in_one_line(one) for one in (error, error.__cause__) if one)
            unlike = folder and isinstance(error, datasets.exceptions.DatasetGenerationError)
            hint = "; if its files have unlike columns, list them in `path`, where each may have its own"
            raise RunError(
                f"{self.path}: {what} it cannot be read: {': '.join(reasons)}{hint if unlike else ''}"
            ) from error

    def _split_of(self, found: Any) -> Any:
        if not isinstance(found, dict):
            if self.split is not None:
                raise RunError(f"{self.path}: holds one split, without a name; remove split")
            return found
        split = self.split or "train"
        if split not in found:
            raise RunError(f"{self.path}: has no split {split!r}; it has {', '.join(found)}")
        return found[split]

    def fingerprint(self) -> str:
        """Returns what tells the rows from others: a SHA-256 of the files, or what `datasets` computes."""
        limit = "" if self.limit is None else f"first {self.limit} of "
        if is_hub_dataset(self.path):
            return limit + (self._of_builder() if self.streaming else str(self._loaded()._fingerprint))
        if not self.streaming:
            return limit + fingerprint(self.path)
        return limit + hashlib.sha256(repr((self.path, self.version)).encode()).hexdigest()

    def _of_builder(self) -> str:
        import datasets

        with self._faults():
            builder = datasets.load_dataset_builder(self.path, self.subset, revision=self.revision)
        return f"{self.path} {builder.config.name} {self.split or 'train'} {builder.hash}"

    @property
    def version(self) -> tuple[tuple[str, int, int], ...] | None:
        """What tells a file or folder from one that was there before it; None of all else."""
        with suppress(OSError):
            found = [(str(file), file.stat()) for file in self._files()]
            return tuple((name, each.st_mtime_ns, each.st_size) for name, each in found)
        return None

    @property
    def size(self) -> float:
        """The bytes of the file or folder; infinite for a dataset of the hub."""
        if is_hub_dataset(self.path):
            return float("inf")
        return sum(file.stat().st_size for file in self._files() if file.is_file())

    def _files(self) -> list[Path]:
        path = Path(self.path)
        return sorted(path.rglob("*")) if path.is_dir() else [path]


def _unheld(loaded: Any, row: int, names: Sequence[str]) -> str:
    """Returns which column of a row holds what Python cannot; a stream cannot be asked."""
    for name in names if hasattr(loaded, "__getitem__") else ():
        try:
            loaded.select_columns(name)[row]
        except NO_VALUE:
            return repr(name)
    return "a value"


def _in_one_line(error: BaseException) -> str:
    """Returns an error's lines as one, cut where it shows whole schemas."""
    text = " ".join(str(error).split()).removesuffix(".") or type(error).__name__
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…"


def sources_of(dataset: DatasetConfig) -> list[tuple[Source, float]]:
    """Returns where a dataset's rows come from, with the weight of each."""
    columns = tuple(dataset.columns.items())
    how = dataset.split, dataset.subset, dataset.revision, columns, dataset.streaming, dataset.max_samples
    return [(Source(file.path, *how), file.weight) for file in dataset.path]


_MOST_SHOWN = 300  # characters of another library's error
_SAVED = ("state.json", "dataset_dict.json")  # what `save_to_disk` writes


def fingerprint(path: str | Path) -> str:
    """Returns the SHA-256 of a file, or of the files in a folder, as hexadecimal digits."""
    path = Path(path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        each = [(str(file.relative_to(path)), fingerprint(file)) for file in files]
        return hashlib.sha256(repr(each).encode()).hexdigest()
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
