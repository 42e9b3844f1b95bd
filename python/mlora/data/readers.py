"""Reads files of any kind row by row: fields by name, and where they stand."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, AnyStr

from mlora.config.dataset_config import FIELDS
from mlora.data.record import TwiceError, json_name, json_of, names_of, once
from mlora.errors import RunError, first_line
from mlora.regular_files import open_regular

Row = tuple[str, dict[str, Any]]
"""Where a row stands, for messages, and its fields."""
Columns = Sequence[tuple[str, str]]
"""Fields, and the columns that hold them."""

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
_LONGEST_LINE = 64 << 20  # bytes of a line, characters of a CSV value
_LONGEST_LIST = 256 << 20  # bytes of a JSON list in a packed file, whose size does not show
UNREAD = "(not read)"
"""Stands for the value of a column that no format reads; messages name the column."""
NO_VALUE = (ValueError, OverflowError, LookupError, NotImplementedError)
"""What Arrow raises for a value that Python cannot hold: a year above 9999, text that is not UTF-8."""
_SUFFIXES = {".gz", ".bz2", ".xz", ".zst"}
_STREAM = b"\xff\xff\xff\xff"  # begins Arrow's streaming format, which `datasets` writes


def read_rows(path: Path, columns: Columns = ()) -> Iterator[Row]:
    """Yields the rows of a jsonl, JSON (a list of objects), CSV, TSV, Parquet or Arrow file.

    Its content tells which; of CSV and TSV, its name. jsonl, JSON, CSV and TSV may be packed (gzip, bzip2,
    xz, zstd). Only a JSON list is in memory as a whole.

    Args:
        columns: see `named`.

    Raises:
        RunError: it cannot be read, is of another kind, or lacks a column; names the file and, if it can,
            the line.
    """
    try:
        start = _start(path)
        for magic, what in _REFUSED.items():
            if start.startswith(magic):
                raise RunError(f"{path}: is {what}")
        if start.startswith((b"PAR1", b"ARROW1", _STREAM)):
            yield from _binary(path, start, columns)
        else:
            yield from _text(path, start, columns)
    except EOFError as error:
        raise RunError(f"{path}: cannot be read: {first_line(error)}") from error
    except (OSError, lzma.LZMAError, zlib.error) as error:
        raise RunError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or first_line(error)}"
        ) from error


def named(place: str, fields: dict[str, Any], columns: Columns) -> dict[str, Any]:
    """Returns the fields of a row, of which those of `columns` stand in columns of other names.

    Other columns keep their names. Raises RunError if a column is missing.
    """
    if not columns:
        return fields
    for name, column in columns:
        if column not in fields:
            has = names_of(fields, "no columns")
            raise RunError(f"{place}: columns.{name}: {column!r} is missing; the row has {has}")
    taken = {column for _, column in columns}
    rest = {key: value for key, value in fields.items() if key not in taken}
    return rest | {name: fields[column] for name, column in columns}


def suffix_of(path: Path) -> str:
    """Returns the suffix of a file's name in lower case, without that of a packing such as ``.gz``."""
    name = path.with_suffix("") if path.suffix.lower() in _SUFFIXES else path
    return name.suffix.lower()


def _start(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read(256)


def _zstd(path: Path) -> IO[bytes]:
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))


def _text(path: Path, start: bytes, columns: Columns) -> Iterator[Row]:
    suffix = suffix_of(path)
    opened = next((how for magic, how in _PACKED.items() if start.startswith(magic)), None)
    with opened(path) if opened else open(path, "rb") as file:
        if opened is not None:
            start = file.peek(256)[:256]  # type: ignore[attr-defined]
        begins = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        if begins == b"[" and suffix not in (".csv", ".tsv"):
            rows = _array(path, file, packed=opened is not None)
        elif begins != b"{" and suffix in (".csv", ".tsv"):
            yield from _table(path, file, "\t" if suffix == ".tsv" else ",", columns)
            return
        else:
            rows = _lines(path, file)
        yield from ((place, named(place, fields, columns)) for place, fields in rows)


def _lines(path: Path, file: IO[bytes]) -> Iterator[Row]:
    for number, raw in enumerate(_bounded(path, file), 1):
        if raw.strip():
            place = f"{path}:{number}"
            line = raw.rstrip(b"\r\n")
            fields = _json(place, line, partial(_json_fault, raw), mark="-sig" if number == 1 else "")
            yield place, _object(fields, place)


def _json(place: str, content: bytes, fault: Callable[[Exception], str], mark: str = "-sig") -> Any:
    """Returns the value of JSON in UTF-8; raises RunError."""
    try:
        return json_of(content.decode(f"utf-8{mark}"))
    except UnicodeDecodeError as error:
        raise RunError(f"{place}: is not UTF-8: {error.reason}") from error
    except TwiceError as error:
        raise RunError(f"{place}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{place}: is not JSON: {fault(error)}") from error


def _bounded(path: Path, file: IO[AnyStr]) -> Iterator[AnyStr]:
    """Yields a file's lines; raises RunError for one that is too long to be held in memory."""
    number = 0
    while line := file.readline(_LONGEST_LINE + 1):
        number += 1
        if len(line) > _LONGEST_LINE:
            raise RunError(f"{path}:{number}: the line is longer than {_LONGEST_LINE >> 20} MiB; split it")
        yield line


def _object(fields: Any, place: str) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise RunError(f"{place}: must be a JSON object, got {json_name(fields)}")
    return fields


def _json_fault(line: bytes, error: Exception) -> str:
    if line.strip() == b"{":
        return "an object continues on the next line; write each object on one line"
    if isinstance(error, json.JSONDecodeError):  # its lineno counts within this one line: not shown
        reason = error.msg.removesuffix(" at")
        return f"{reason} at character {error.pos + 1}; expected one JSON object per line"
    if isinstance(error, RecursionError):
        return "brackets are nested too deeply"
    return f"a number has more than {sys.get_int_max_str_digits()} digits"


def _array(path: Path, file: IO[bytes], *, packed: bool) -> Iterator[Row]:
    content = file.read(_LONGEST_LIST + 1 if packed else -1)
    if packed and len(content) > _LONGEST_LIST:
        longest = f"{_LONGEST_LIST >> 20} MiB"
        raise RunError(f"{path}: the list is longer than {longest}; unpack it, or write one object a line")
    rows = _json(str(path), content, first_line)
    for number, fields in enumerate(rows, 1):
        place = f"{path}, object {number}"
        yield place, _object(fields, place)


def _table(path: Path, file: IO[bytes], delimiter: str, columns: Columns) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_LINE)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    reader = csv.DictReader(_bounded(path, text), delimiter=delimiter, strict=True)
    try:
        _check_names(path, reader.fieldnames or ())
        for fields in reader:
            place = f"{path}:{reader.line_num}"
            if None in fields or None in fields.values():
                raise RunError(f"{place}: has another number of values than the first line has names")
            own = named(place, fields, columns)
            try:
                values = {key: _value(key, value) for key, value in own.items()}
            except TwiceError as error:
                raise RunError(f"{place}: {error}") from error
            yield place, {key: value for key, value in values.items() if value is not None}
    except csv.Error as error:
        raise RunError(f"{path}:{reader.line_num}: is not CSV: {error}") from error
    except UnicodeDecodeError as error:
        raise RunError(f"{path}:{reader.line_num + 1}: is not UTF-8: {error.reason}") from error


def _check_names(path: Path, names: Sequence[str]) -> None:
    twice = next((name for name, count in Counter(names).items() if name and count > 1), None)
    if twice:
        raise RunError(f"{path}: has two columns {twice!r}; remove or rename one")


def _value(key: str, value: str) -> Any:
    """Returns a CSV value as JSON would have it: numbers, lists, objects; text where it is none of these."""
    if key in TEXT:
        return value
    if not value:
        return None
    try:
        return _cell(value.lower() if value in ("True", "False") else value)
    except TwiceError:
        raise
    except (ValueError, RecursionError):
        return value


def _no_number(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are no JSON


_cell = json.JSONDecoder(object_pairs_hook=once, parse_constant=_no_number).decode


def _binary(path: Path, start: bytes, columns: Columns) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    what = "Parquet" if start.startswith(b"PAR1") else "Arrow"
    try:
        if what == "Parquet":
            file = pq.ParquetFile(path)
            names = file.schema_arrow.names
        else:
            stream, source = start.startswith(_STREAM), pa.memory_map(str(path))
            file = pa.ipc.open_stream(source) if stream else pa.ipc.open_file(source)
            names = file.schema.names
        _check_names(path, names)
        wanted = read_columns(names, columns)
        if what == "Parquet":
            batches = file.iter_batches(columns=wanted)
        else:
            every = file if stream else map(file.get_batch, range(file.num_record_batches))
            batches = (batch.select(wanted) for batch in every)
        yield from _rows_of(path, names, batches, columns)
    except pa.ArrowInvalid as error:
        raise RunError(f"{path}: is no whole {what} file: {first_line(error)}") from error


def read_columns(names: Iterable[str], columns: Columns) -> list[str]:
    """Returns those of a table's columns that a format may read; others may hold what Python cannot."""
    taken = {column for _, column in columns}
    return [name for name in names if name in FIELDS or name in taken]


def _rows_of(path: Path, names: Sequence[str], batches: Iterable[Any], columns: Columns) -> Iterator[Row]:
    number, unread = 0, dict.fromkeys(names, UNREAD)
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except NO_VALUE as error:
            raise _no_value(path, number, batch) from error
        for fields in rows:
            number += 1
            place = f"{path}, row {number}"
            yield place, given(named(place, unread | fields, columns))


def _no_value(path: Path, before: int, batch: Any) -> RunError:
    """Returns the error for the first value of a batch, after `before` rows, that Python cannot hold."""
    for row in range(batch.num_rows):
        for name in batch.schema.names:
            try:
                batch.column(name)[row].as_py()
            except NO_VALUE as error:
                return RunError(
                    f"{path}, row {before + row + 1}: {name!r} cannot be read: {first_line(error)}"
                )
    return RunError(f"{path}: a row after row {before} cannot be read")


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that a row of a table has, and those of its messages; others are null there."""
    return {key: _given(value) for key, value in fields.items() if value is not None}


def _given(value: Any) -> Any:
    if isinstance(value, list):
        return [_given(one) for one in value] if value and isinstance(value[0], dict | list) else value
    return given(value) if isinstance(value, dict) else value
