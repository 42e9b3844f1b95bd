"""Files that are not jsonl: one line says what they are, what is read, and how to convert them."""

import bz2
import gzip
import io
import itertools
import json
import lzma
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from mlora.data.dataset import load_dataset, read_prompt_lines
from mlora.data.file_types import refuse_other_kinds
from mlora.errors import RunError

ROWS = [{"prompt": "1+1=", "completion": "2"}, {"prompt": 'a "b", ü', "completion": "c"}]
CSV = 'prompt,completion\n1+1=,2\n"a ""b"", ü",c\n'
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)


def refusal(path: Path, content: str | bytes) -> str:
    """What is said of a dataset with this content."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RunError) as error:
        load_dataset("d", path, "tokens", max_length=8, vocab_size=9)
    (line,) = str(error.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("d.csv", CSV, "CSV"),
        ("d.TSV", CSV.replace(",", "\t"), "TSV"),
        ("d.parquet", b"PAR1" + bytes(range(200)), "Parquet"),
        ("d.arrow", b"ARROW1\0\0", "Arrow"),
        ("d.jsonl.gz", gzip.compress(JSONL.encode()), "compressed with gzip"),
        ("d.jsonl", gzip.compress(JSONL.encode()), "compressed with gzip"),
        ("d.zst", b"\x28\xb5\x2f\xfd\0", "compressed with zstd"),
        ("d.xz", b"\xfd7zXZ\0", "compressed with xz"),
        ("d.bz2", b"BZh91AY", "compressed with bzip2"),
        ("d.zip", b"PK\x03\x04", "a zip archive"),
        ("d.xlsx", b"PK\x03\x04", "an Excel workbook"),
        ("d.jsonl", JSONL.encode("utf-16"), "text in UTF-16"),
        ("d.json", json.dumps(ROWS), "a JSON array"),
        ("d.json", "\ufeff\n" + json.dumps(ROWS, indent=2), "a JSON array"),
        ("d.jsonl", json.dumps(ROWS), "a JSON array"),
    ],
    ids=map(str, itertools.count()),
)
def test_what_a_file_is_and_what_is_read(tmp_path: Path, name: str, content: str | bytes, kind: str) -> None:
    expected = f"{tmp_path / name}: is {kind}; expected jsonl, one JSON object per line; convert"
    assert refusal(tmp_path / name, content).startswith(expected)


@pytest.mark.parametrize(("name", "content"), [("my d.csv", CSV), ("d.json", json.dumps(ROWS, indent=1))])
def test_the_command_converts(tmp_path: Path, name: str, content: str) -> None:
    command = refusal(tmp_path / name, content).partition("convert it with: ")[2]
    assert command.startswith("python ")
    python = command.replace("python", shlex.quote(sys.executable), 1)
    subprocess.run(python, shell=True, check=True, env={"PYTHONUTF8": "1"})
    assert (tmp_path / name).with_suffix(".jsonl").read_text() == JSONL


@pytest.mark.parametrize("name", ["d.csv", "d.json", "d.jsonl.gz", "d.gz"])
def test_the_command_writes_over_nothing(tmp_path: Path, name: str) -> None:
    packed = gzip.compress(JSONL.encode())
    content = {"d.csv": CSV, "d.json": json.dumps(ROWS)}.get(name, packed)
    for new in ("d.jsonl", "d.new.jsonl", "d.new2.jsonl"):
        command = refusal(tmp_path / name, content).partition("convert it with: ")[2]
        assert command.endswith(f" {tmp_path / new}")
        subprocess.run(command.replace("python", shlex.quote(sys.executable), 1), shell=True, check=True)
        assert (tmp_path / new).read_text() == JSONL


def zipped(content: bytes) -> bytes:
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as archive:
        archive.writestr("inner", content)
    return buffer.getvalue()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gunzip": gzip.compress,
    "unxz": lzma.compress,
    "bunzip2": bz2.compress,
    "unzip": zipped,
    "unzstd": lambda content: subprocess.run(["zstd"], input=content, check=True, capture_output=True).stdout,
    "iconv": lambda content: content.decode().encode("utf-16"),
}


@pytest.mark.parametrize(
    ("tool", "name", "becomes"),
    [
        ("gunzip", "my d.jsonl.gz", "my d.jsonl"),
        ("gunzip", "d.gz", "d.jsonl"),
        ("gunzip", "d.jsonl", "d.new.jsonl"),
        ("gunzip", "d", "d.new"),
        ("unxz", "d.jsonl.xz", "d.jsonl"),
        ("unxz", "d.jsonl", "d.new.jsonl"),
        ("bunzip2", "d.jsonl.bz2", "d.jsonl"),
        ("bunzip2", "d.json", "d.new.json"),
        ("unzip", "d.zip", "d.jsonl"),
        ("unzip", "d.jsonl", "d.new.jsonl"),
        ("unzstd", "d.jsonl.zst", "d.jsonl"),
        ("unzstd", "d.jsonl", "d.new.jsonl"),
        ("iconv", "d.jsonl", "d.new.jsonl"),
        ("iconv", "d.txt", "d.jsonl"),
    ],
)
def test_the_command_unpacks(tmp_path: Path, tool: str, name: str, becomes: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"there is no {tool}")
    content = '{"input_ids": [1, 2]}\n{"input_ids": [3, 4]}\n'
    packed = PACKERS[tool](content.encode())
    command = refusal(tmp_path / name, packed).partition("convert it with: ")[2]
    assert command.startswith(f"{tool} ")
    subprocess.run(command, shell=True, check=True)
    assert (tmp_path / name).read_bytes() == packed
    assert len(load_dataset("d", tmp_path / becomes, "tokens", max_length=8, vocab_size=9).samples) == 2


@pytest.mark.parametrize(
    ("name", "writer", "needs"),
    [
        ("d.parquet", "to_parquet", "pyarrow"),
        ("d", "to_feather", "pyarrow"),
        ("d.xlsx", "to_excel", "openpyxl"),
    ],
)
def test_the_command_converts_tables(tmp_path: Path, name: str, writer: str, needs: str) -> None:
    pytest.importorskip(needs)
    pandas = pytest.importorskip("pandas")
    write = getattr(pandas.DataFrame(ROWS), writer)
    write(tmp_path / "table", **({"engine": needs, "index": False} if needs == "openpyxl" else {}))
    command = refusal(tmp_path / name, (tmp_path / "table").read_bytes()).partition("convert it with: ")[2]
    assert command.startswith("python ")
    subprocess.run(command.replace("python", shlex.quote(sys.executable), 1), shell=True, check=True)
    made = (tmp_path / name).with_suffix(".jsonl").read_text().splitlines()
    assert [json.loads(line) for line in made] == ROWS


def test_packed_prompts_keep_the_kind_that_their_name_says(tmp_path: Path) -> None:
    for name, becomes in [("p.txt.gz", "p.txt"), ("p.txt", "p.new.txt")]:
        (tmp_path / name).write_bytes(gzip.compress(b"one\n"))
        with pytest.raises(RunError, match=f"> {tmp_path / becomes}$"):
            read_prompt_lines(tmp_path / name)


@pytest.mark.parametrize("name", ["d.jsonl", "d.csv", "d.json", "d"])
def test_objects_line_by_line_are_read_whatever_the_file_is_called(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('\ufeff  {"input_ids": [1, 2]}\n{"input_ids": [3, 4]}\n')
    assert len(load_dataset("d", tmp_path / name, "tokens", max_length=8, vocab_size=9).samples) == 2


def test_prompts_are_jsonl_or_text(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("[1, 2, what comes next?\n\nmore\n")
    assert read_prompt_lines(path) == ["[1, 2, what comes next?", "more"]
    for name, content, kind in [("p.csv", CSV, "CSV"), ("p.json", json.dumps(ROWS), "a JSON array")]:
        (tmp_path / name).write_text(content)
        with pytest.raises(RunError, match=f"is {kind}; expected jsonl, or text with one prompt per line"):
            read_prompt_lines(tmp_path / name)


def test_prompts_of_text_end_at_newlines_only(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffone\ftwo\r\nthree\u0085four\u2028five\x1csix\n\n".encode())
    assert read_prompt_lines(path) == ["one\ftwo", "three\u0085four\u2028five\x1csix"]


def test_what_is_no_file_is_left_to_its_reader(tmp_path: Path) -> None:
    refuse_other_kinds(tmp_path)
    refuse_other_kinds(tmp_path / "none")
    with pytest.raises(RunError, match="cannot be read: Is a directory"):
        load_dataset("d", tmp_path, "tokens", max_length=8, vocab_size=9)
