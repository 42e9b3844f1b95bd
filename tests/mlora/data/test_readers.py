"""Files of every kind give the same rows; what cannot be read is told in one line."""

import bz2
import csv
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlora.data import readers
from mlora.data.dataset import load_dataset, read_prompt_lines
from mlora.data.readers import read_rows
from mlora.errors import RunError

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "completion": "007", "label": 1, "input_ids": [1, 2], "answers": True},
    {"prompt": 'a "b", ü\nx', "completion": "[1]", "label": 2.5, "input_ids": [3], "answers": False},
]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def table(delimiter: str) -> bytes:
    written = io.StringIO()
    writer = csv.DictWriter(written, list(ROWS[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return written.getvalue().encode()


def of_arrow(write: Callable[[Any, pa.Table], None]) -> bytes:
    sink = pa.BufferOutputStream()
    write(sink, pa.Table.from_pylist(ROWS))
    return sink.getvalue().to_pybytes()


def ipc(sink: Any, rows: pa.Table) -> None:
    with pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows)


def ipc_stream(sink: Any, rows: pa.Table) -> None:
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


FILES = {
    "d.jsonl": JSONL,
    "d": b"\xef\xbb\xbf  " + JSONL,
    "other.csv": JSONL,
    "d.json": json.dumps(ROWS, indent=1).encode(),
    "list.jsonl": b"\xef\xbb\xbf\n" + json.dumps(ROWS).encode(),
    "d.csv": table(","),
    "bom.csv": b"\xef\xbb\xbf" + table(","),
    "d.TSV": table("\t"),
    "d.parquet": of_arrow(lambda sink, rows: pq.write_table(rows, sink)),
    "no-suffix": of_arrow(lambda sink, rows: pq.write_table(rows, sink, row_group_size=1)),
    "d.arrow": of_arrow(ipc),
    "stream.arrow": of_arrow(ipc_stream),
    "d.jsonl.gz": gzip.compress(JSONL),
    "packed.jsonl": gzip.compress(JSONL),
    "d.csv.gz": gzip.compress(table(",")),
    "d.bz2": bz2.compress(JSONL),
    "d.xz": lzma.compress(JSONL),
    "d.json.zst": zstd(json.dumps(ROWS).encode()),
}


@pytest.mark.parametrize("name", FILES)
def test_the_same_rows(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    assert [fields for _, fields in read_rows(tmp_path / name)] == ROWS


def test_what_a_row_of_a_table_lacks_is_missing(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b"}, {"chosen": "c"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    assert [fields for _, fields in read_rows(tmp_path / "d.parquet")] == rows
    (tmp_path / "d.csv").write_text("prompt,label\na,\n,2\n")
    assert [fields for _, fields in read_rows(tmp_path / "d.csv")] == [
        {"prompt": "a"},
        {"prompt": "", "label": 2},
    ]


def test_what_a_message_lacks_is_missing(tmp_path: Path) -> None:
    """A column of messages has the keys of all of them; templates ask which ones a message has."""
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"x": 1}]}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    assert [fields for _, fields in read_rows(tmp_path / "d.parquet")] == rows


def test_values_of_csv(tmp_path: Path) -> None:
    values = ["1", "1.5", "true", "True", "01", "NaN", "-Infinity", "[NaN]", "yes", "null", "x" * 200_000]
    (tmp_path / "d.csv").write_text("text,label\n" + "".join(f"t,{value}\n" for value in values))
    found = [fields.get("label") for _, fields in read_rows(tmp_path / "d.csv")]
    assert found == [1, 1.5, True, True, "01", "NaN", "-Infinity", "[NaN]", "yes", None, "x" * 200_000]


def test_columns_of_csv_are_read_as_the_fields_that_they_hold(tmp_path: Path) -> None:
    """Text stays text whatever its column is called, and a column without a value is not a missing one."""
    (tmp_path / "d.csv").write_text("q,a,mark\n1,064,\n[2],,3\n")
    columns = (("prompt", "q"), ("completion", "a"), ("label", "mark"))
    assert [fields for _, fields in read_rows(tmp_path / "d.csv", columns)] == [
        {"prompt": "1", "completion": "064"},
        {"prompt": "[2]", "completion": "", "label": 3},
    ]
    pq.write_table(pa.table({"mark": pa.array([1, None])}), tmp_path / "d.parquet")
    found = read_rows(tmp_path / "d.parquet", (("label", "mark"),))
    assert [fields for _, fields in found] == [{"label": 1}, {}]


def odd_table(good: str, odd: str, kind: str) -> pa.Table:
    """Three rows, of whose column `odd` the last one holds what Python cannot."""
    if kind == "year":  # 1970, 1970 and 300000
        values = pa.array([0, 1, 9_400_000_000_000], pa.timestamp("s"))
    else:  # "a", "b" and a byte that begins no character
        values = pa.Array.from_buffers(
            pa.string(), 3, [None, pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in range(4))),
                             pa.py_buffer(b"ab\xff")])  # fmt: skip
    return pa.table({good: ["x", "y", "z"], odd: values})


ODD = {
    "d.parquet": lambda rows, path: pq.write_table(rows, path),
    "d.arrow": lambda rows, path: ipc(str(path), rows),
    "s.arrow": lambda rows, path: ipc_stream(str(path), rows),
}


@pytest.mark.parametrize("kind", ["year", "text"])
@pytest.mark.parametrize("name", ODD)
def test_values_that_python_cannot_hold(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    ODD[name](odd_table("text", "date", kind), path)
    found = [fields for _, fields in read_rows(path)]
    assert [fields["text"] for fields in found] == ["x", "y", "z"]  # nobody reads `date`
    assert found[0].keys() == {"text", "date"}  # but messages may name it
    ODD[name](odd_table("prompt", "text", kind), path)
    with pytest.raises(RunError, match=rf"{name}, row 3: 'text' cannot be read: .+"):
        list(read_rows(path))
    ODD[name](odd_table("prompt", "date", kind), path)
    with pytest.raises(RunError, match=rf"{name}, row 3: 'date' cannot be read: .+"):
        list(read_rows(path, (("text", "date"),)))


def zipped() -> bytes:
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as archive:
        archive.writestr("inner", JSONL)
    return buffer.getvalue()


def two_columns(sink: Any, rows: pa.Table) -> None:
    pq.write_table(pa.Table.from_arrays([rows["label"], rows["answers"]], names=["a", "a"]), sink)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.zip", zipped(), "d.zip: is a zip archive or an Excel workbook; unpack it, or save it as CSV"),
        ("d.jsonl", JSONL.decode().encode("utf-16"), "d.jsonl: is text in UTF-16; save it as UTF-8"),
        ("d.gz", FILES["d.jsonl.gz"][:40], "d.gz: cannot be read: Compressed file ended"),
        ("d.xz", FILES["d.xz"][:40], "d.xz: cannot be read: "),
        ("d.zst", FILES["d.json.zst"][:40], "d.zst: "),
        ("d.parquet", FILES["d.parquet"][:200], "d.parquet: is no whole Parquet file: "),
        ("d.arrow", FILES["d.arrow"][:-200], "d.arrow: is no whole Arrow file: "),
        ("d.json", b"[1, 2]", "d.json, object 1: must be a JSON object, got a number"),
        ("d.json", b'[{"a": 1}', "d.json: is not JSON: "),
        ("d.csv", b"a,b\n1,2\n3\n", "d.csv:3: has another number of values than the first line has names"),
        ("d.csv", b"a,b\n1,2,3\n", "d.csv:2: has another number of values"),
        ("d.csv", b'a,b\n1,"2\n', "d.csv:1: is not CSV: unexpected end of data"),
        ("d.csv", b"a,b\n\xff,2\n", "is not UTF-8: invalid start byte"),
        ("d.csv", b"a,b,a\n1,2,3\n", "d.csv: has two columns 'a'; remove or rename one"),
        ("d.parquet", of_arrow(two_columns), "d.parquet: has two columns 'a'; remove or rename one"),
        ("d.gz", FILES["d.jsonl.gz"][:10] + b"\xff" * 40, "d.gz: cannot be read: "),
        ("d.jsonl", b'{"text": "a", "text": "b"}', "d.jsonl:1: the key 'text' is given twice; remove one"),
        ("d.jsonl", b'{"a": [{"r": 1, "r": 1}]}', "d.jsonl:1: the key 'r' is given twice; remove one"),
        ("d.json", b'[{"a": 1}, {"a": 1, "a": 1}]', "d.json: the key 'a' is given twice; remove one"),
        ("d.csv", b'label\n"{""a"": 1, ""a"": 2}"\n', "d.csv:2: the key 'a' is given twice; remove one"),
        ("d.jsonl", b'{"a": 1}\n{\n', "d.jsonl:2: is not JSON: an object continues on the next line"),
    ],
    ids=map(str, count()),
)
def test_what_cannot_be_read(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RunError) as error:
        list(read_rows(tmp_path / name))
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl.gz", b'{"a": 1}\n{"a": "%s"}', "d.jsonl.gz:2: the line is longer than 1 MiB; split it"),
        ("d.jsonl", b'{"a": "%s"}', "d.jsonl:1: the line is longer than 1 MiB; split it"),
        ("d.csv.gz", b"a\n%s", "d.csv.gz:2: the line is longer than 1 MiB; split it"),
        ("d.json.gz", b'[{"a": "%s"}]', "d.json.gz: the list is longer than 2 MiB; unpack it, or"),
    ],
)
def test_lines_that_a_small_file_hides(
    name: str, content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_LONGEST_LINE", 1 << 20)
    monkeypatch.setattr(readers, "_LONGEST_LIST", 2 << 20)
    whole = content % (b" " * (2 << 20))
    (tmp_path / name).write_bytes(gzip.compress(whole, 1) if name.endswith(".gz") else whole)
    with pytest.raises(RunError) as error:
        list(read_rows(tmp_path / name))
    assert message in str(error.value)


def test_every_kind_gives_the_same_tokens(tmp_path: Path) -> None:
    found = []
    for name in ("d.jsonl", "d.csv", "d.parquet", "d.json"):
        (tmp_path / name).write_bytes(FILES[name])
        options: Any = {"max_length": 8, "vocab_size": 9}
        found.append(list(load_dataset("d", tmp_path / name, "tokens", **options).samples))
    assert found[0]
    assert found == [found[0]] * 4


def test_prompts_are_rows_or_text(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("[1, 2, what comes next?\n\nmore\n")
    assert read_prompt_lines(path) == ["[1, 2, what comes next?", "more"]
    for name in ("d.jsonl", "d.csv", "d.json", "d.parquet"):
        (tmp_path / name).write_bytes(FILES[name])
        assert read_prompt_lines(tmp_path / name) == [row["prompt"] for row in ROWS]


def test_prompts_may_be_packed(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "one"}\n'))
    assert read_prompt_lines(path) == ["one"]


def test_prompts_of_text_end_at_newlines_only(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffone\ftwo\r\nthree\u0085four\u2028five\x1csix\n\n".encode())
    assert read_prompt_lines(path) == ["one\ftwo", "three\u0085four\u2028five\x1csix"]


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="none: cannot be read: No such file or directory"):
        list(read_rows(tmp_path / "none"))
