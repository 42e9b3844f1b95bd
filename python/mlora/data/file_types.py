"""Refuses files that are not jsonl, such as CSV and Parquet, and says how to convert them."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from mlora.errors import RunError


@dataclass(frozen=True)
class FileType:
    """A kind of file that is not read."""

    name: str
    convert: str  # a shell command that converts it to jsonl; ``{file}`` and ``{new}`` are paths
    packed: str = ""  # the suffix of a compressed file; empty for other kinds


def _pandas(reader: str) -> str:
    write = "to_json(sys.argv[2], orient='records', lines=True)"
    return f'python -c "import pandas, sys; pandas.{reader}(sys.argv[1]).{write}" {{file}} {{new}}'


def _rows(rows: str) -> str:
    print_rows = f"[print(json.dumps(row)) for row in {rows}]"
    return f'python -c "import csv, json, sys; {print_rows}" < {{file}} > {{new}}'


ARRAY = FileType("a JSON array", _rows("json.load(sys.stdin)"))
BY_START = {
    b"PAR1": FileType("Parquet", _pandas("read_parquet")),
    b"ARROW1": FileType("Arrow", _pandas("read_feather")),
    b"\x1f\x8b": FileType("compressed with gzip", "gunzip < {file} > {new}", ".gz"),
    b"\x28\xb5\x2f\xfd": FileType("compressed with zstd", "unzstd < {file} > {new}", ".zst"),
    b"\xfd7zXZ": FileType("compressed with xz", "unxz < {file} > {new}", ".xz"),
    b"BZh": FileType("compressed with bzip2", "bunzip2 < {file} > {new}", ".bz2"),
    b"PK\x03\x04": FileType("a zip archive", "unzip -p {file} > {new}", ".zip"),
    b"\xff\xfe": FileType("text in UTF-16", "iconv -f UTF-16 -t UTF-8 {file} > {new}"),
    b"\xfe\xff": FileType("text in UTF-16", "iconv -f UTF-16 -t UTF-8 {file} > {new}"),
}
BY_SUFFIX = {
    ".csv": FileType("CSV", _rows("csv.DictReader(sys.stdin)")),
    ".tsv": FileType("TSV", _rows("csv.DictReader(sys.stdin, delimiter=chr(9))")),
    ".xlsx": FileType("an Excel workbook", _pandas("read_excel")),
}


def refuse_other_kinds(path: Path, *, plain_text: bool = False) -> None:
    """Raises RunError, with a command that converts the file, if a file is clearly not jsonl.

    With `plain_text`, lines of text are read, too, so that a file other than ``.json`` may begin with ``[``.
    """
    if not os.path.isfile(path):  # a pipe can be read only once; the reader reports a missing file
        return
    try:
        with open(path, "rb") as file:
            start = file.read(256)
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
    found = _kind(path, start, array=not plain_text or path.suffix.lower() == ".json")
    if found:
        new = shlex.quote(str(_converted(path, found)))
        command = found.convert.format(file=shlex.quote(str(path)), new=new)
        what = "jsonl, or text with one prompt per line" if plain_text else "jsonl, one JSON object per line"
        raise RunError(f"{path}: is {found.name}; expected {what}; convert it with: {command}")


def _converted(path: Path, kind: FileType) -> Path:
    """Returns the path for the converted file; no file of this name exists."""
    if kind.packed and path.suffix.lower() != kind.packed:
        new = path  # the name already fits the unpacked file
    elif kind.packed and path.with_suffix("").suffix:
        new = path.with_suffix("")
    else:
        new = path.with_suffix(".jsonl")
    free, count = new, 1
    while free.exists():
        free = new.with_name(f"{new.stem}.new{'' if count == 1 else count}{new.suffix}")
        count += 1
    return free


def _kind(path: Path, start: bytes, *, array: bool) -> FileType | None:
    if path.suffix.lower() == ".xlsx":  # its content begins as a zip archive
        return BY_SUFFIX[".xlsx"]
    for magic, kind in BY_START.items():
        if start.startswith(magic):
            return kind
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"{"):
        return None
    return ARRAY if array and text.startswith(b"[") else BY_SUFFIX.get(path.suffix.lower())
