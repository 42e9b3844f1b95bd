"""Reads files of any kind row by row: fields by name, and where they stand."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from mlora.data.record import json_name
from mlora.errors import RunError, first_line

Row = tuple[str, dict[str, Any]]
"""Where a row stands, for messages, and its fields."""

_TEXT = "text prompt completion instruction input output system question context chosen rejected"
TEXT = frozenset(_TEXT.split())
"""Fields that are text in a CSV file even if they look like numbers or JSON."""
_REFUSED = {
    b"PK\x03\x04": "a zip archive or an Excel workbook; unpack it, or save it as CSV",
    b"\xff\xfe": "text in UTF-16; save it as UTF-8",
    b"\xfe\xff": "text in UTF-16; save it as UTF-8",
}
_PACKED: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
    b"\x28\xb5\x2f\xfd": lambda path: _zstd(path),
}
_SUFFIXES = {".gz", ".bz2", ".xz", ".zst"}


def read_rows(path: Path) -> Iterator[Row]:
    """Yields the rows of a jsonl, JSON (a list of objects), CSV, TSV, Parquet or Arrow file.

    Its content tells which; of CSV and TSV, its name. jsonl, JSON, CSV and TSV may be packed (gzip, bzip2,
    xz, zstd). Only a JSON list is in memory as a whole.

    Raises:
        RunError: it cannot be read, or is of another kind; names the file and, if it can, the line.
    """
    try:
        start = _start(path)
        for magic, what in _REFUSED.items():
            if start.startswith(magic):
                raise RunError(f"{path}: is {what}")
        if start.startswith(b"PAR1"):
            yield from _parquet(path)
        elif start.startswith(b"ARROW1"):
            yield from _arrow(path)
        else:
            yield from _text(path, start)
    except EOFError as error:
        raise RunError(f"{path}: cannot be read: {first_line(error)}") from error
    except (OSError, lzma.LZMAError) as error:
        raise RunError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or first_line(error)}"
        ) from error


def _start(path: Path) -> bytes:
    if not os.path.isfile(path):  # a pipe can be read only once
        return b""
    with open(path, "rb") as file:
        return file.read(256)


def _zstd(path: Path) -> IO[bytes]:
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))


def _text(path: Path, start: bytes) -> Iterator[Row]:
    name = path.with_suffix("") if path.suffix.lower() in _SUFFIXES else path
    opened = next((how for magic, how in _PACKED.items() if start.startswith(magic)), None)
    with opened(path) if opened else open(path, "rb") as file:
        if opened is not None:
            start = file.peek(256)[:256]  # type: ignore[attr-defined]
        begins = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        if begins == b"[" and name.suffix.lower() not in (".csv", ".tsv"):
            yield from _array(path, file)
        elif begins != b"{" and name.suffix.lower() in (".csv", ".tsv"):
            yield from _table(path, file, "\t" if name.suffix.lower() == ".tsv" else ",")
        else:
            yield from _lines(path, file)


def _lines(path: Path, file: IO[bytes]) -> Iterator[Row]:
    for number, raw in enumerate(file, 1):
        if not raw.strip():
            continue
        place = f"{path}:{number}"
        try:
            fields = json.loads(raw.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise RunError(f"{place}: is not UTF-8: {error.reason}") from error
        except (ValueError, RecursionError) as error:
            raise RunError(f"{place}: is not JSON: {_json_fault(error, raw)}") from error
        yield place, _object(fields, place)


def _object(fields: Any, place: str) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise RunError(f"{place}: must be a JSON object, got {json_name(fields)}")
    return fields


def _json_fault(error: Exception, line: bytes) -> str:
    if line.strip() == b"{":
        return "an object continues on the next line; write each object on one line"
    if isinstance(error, json.JSONDecodeError):  # its lineno counts within this one line: not shown
        reason = error.msg.removesuffix(" at")
        return f"{reason} at character {error.pos + 1}; expected one JSON object per line"
    if isinstance(error, RecursionError):
        return "brackets are nested too deeply"
    return f"a number has more than {sys.get_int_max_str_digits()} digits"


def _array(path: Path, file: IO[bytes]) -> Iterator[Row]:
    try:
        rows = json.loads(file.read().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RunError(f"{path}: is not UTF-8: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path}: is not JSON: {first_line(error)}") from error
    for number, fields in enumerate(rows, 1):
        place = f"{path}, object {number}"
        yield place, _object(fields, place)


def _table(path: Path, file: IO[bytes], delimiter: str) -> Iterator[Row]:
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    reader = csv.DictReader(text, delimiter=delimiter, strict=True)
    try:
        for fields in reader:
            place = f"{path}:{reader.line_num}"
            if None in fields or None in fields.values():
                raise RunError(f"{place}: has another number of values than the first line has names")
            yield place, given({key: _value(key, value) for key, value in fields.items()})
    except csv.Error as error:
        raise RunError(f"{path}:{reader.line_num}: is not CSV: {error}") from error
    except UnicodeDecodeError as error:
        raise RunError(f"{path}:{reader.line_num + 1}: is not UTF-8: {error.reason}") from error


def _value(key: str, value: str) -> Any:
    """Returns a CSV value as JSON would have it: numbers, lists, objects; text where it is none of these."""
    if key in TEXT:
        return value
    if not value:
        return None
    try:
        return json.loads(value.lower() if value in ("True", "False") else value)
    except (ValueError, RecursionError):
        return value


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        batches = pq.ParquetFile(path).iter_batches()
        yield from _rows_of(path, batches)
    except pa.ArrowInvalid as error:
        raise RunError(f"{path}: is no whole Parquet file: {first_line(error)}") from error


def _arrow(path: Path) -> Iterator[Row]:
    import pyarrow as pa

    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        yield from _rows_of(path, batches)
    except pa.ArrowInvalid as error:
        raise RunError(f"{path}: is no whole Arrow file: {first_line(error)}") from error


def _rows_of(path: Path, batches: Iterator[Any]) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for fields in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", given(fields)


def given(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that a row of a table has; one that it lacks is null there."""
    return {key: value for key, value in fields.items() if value is not None}
