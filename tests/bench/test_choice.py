"""The table that chooses between the GPU backends: how it is read, written and shown."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlora_ext.backends import measured as choice
from mlora_ext.backends.measured import MeasuredShape, faster_backend, load, nearest


def entry(d_in: int, d_out: int, rank: int, rows: int, cuda: float, dtype: str = "bfloat16") -> MeasuredShape:
    return MeasuredShape(dtype, d_in, d_out, rank, rows, triton_seconds=1.0, cuda_seconds=cuda)


def test_nearest_in_log_space() -> None:
    entries = [
        entry(4096, 4096, 16, 8192, cuda=0.9),
        entry(4096, 4096, 64, 8192, cuda=1.1),
        entry(4096, 4096, 16, 512, cuda=1.1),
    ]
    assert nearest(entries, "bfloat16", 4096, 4096, 16, 8192) == "cuda"
    assert nearest(entries, "bfloat16", 4096, 4096, 48, 8192) == "triton"
    # rank 32 is as far from 16 as from 64: the first in the table
    assert nearest(entries, "bfloat16", 4096, 4096, 32, 8192) == "cuda"
    # rows 3000: 8192 is nearer by ratio, 512 is nearer by difference
    assert nearest(entries, "bfloat16", 4096, 4096, 16, 3000) == "cuda"
    assert nearest(entries, "bfloat16", 4096, 4096, 16, 2000) == "triton"
    assert nearest(entries, "float16", 4096, 4096, 16, 8192) == "triton", "that dtype was not measured"
    assert nearest([entry(8, 8, 8, 8, cuda=1.0)], "bfloat16", 8, 8, 8, 8) == "triton", "equal"
    with pytest.raises(ValueError, match="rank: expected at least 1, got 0"):
        nearest(entries, "bfloat16", 4096, 4096, 0, 8192)


def test_the_package_has_a_table_and_unknown_architectures_go_to_triton() -> None:
    assert choice.PATH.is_file()
    assert isinstance(load(choice.PATH), dict)
    assert faster_backend("sm_00", "bfloat16", 4096, 4096, 16, 8192) == "triton"


GOOD = {
    "dtype": "bfloat16",
    "d_in": 8,
    "d_out": 8,
    "rank": 8,
    "rows": 8,
    "triton_seconds": 1e-3,
    "cuda_seconds": 2e-3,
}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "line 1: expected JSON"),
        ("[]", "format: expected 1, got 'list'"),
        ('{"format": 2}', "format: expected 1, got 2"),
        ('{"format": 1}', "architectures: expected dict, got NoneType"),
        ('{"format": 1, "architectures": {"sm_90": []}}', "sm_90: expected dict, got list"),
        ('{"format": 1, "architectures": {"sm_90": {}}}', "sm_90.entries: expected list, got NoneType"),
        ([1], r"sm_90.entries\[0\]: expected dict, got int"),
        ([{"dtype": "x"}], r"sm_90.entries\[0\]: expected dtype, d_in, .*, got dtype"),
        ([GOOD, GOOD | {"rank": 0}], r"sm_90.entries\[1\].rank: expected a positive int, got 0"),
        ([GOOD | {"rank": 1.5}], r"sm_90.entries\[0\].rank: expected a positive int, got 1.5"),
        ([GOOD | {"rows": True}], r"rows: expected a positive int, got True"),
        ([GOOD | {"cuda_seconds": float("nan")}], r"cuda_seconds: expected a positive float, got nan"),
        ([GOOD | {"dtype": 3}], r"dtype: expected str, got int"),
    ],
)
def test_malformed_tables(tmp_path: Path, content: Any, expected: str) -> None:
    path = tmp_path / "choices.json"
    if not isinstance(content, str):
        content = json.dumps({"format": 1, "architectures": {"sm_90": {"entries": content}}})
    path.write_text(content)
    with pytest.raises(ValueError, match=expected) as error:
        load(path)
    assert str(error.value).startswith(str(path))


def row(triton: float, cuda: float | None, rank: int = 16) -> dict[str, Any]:
    contenders = {"ours, triton": {"seconds": triton}}
    if cuda is not None:
        contenders["ours, cuda"] = {"seconds": cuda}
    sizes = {"d_in": 64, "d_out": 32, "rows": 128, "ranks": [8, rank], "dtype": "bfloat16"}
    return {"section": "choose", "contenders": contenders, **sizes}


def test_write_and_show(tmp_path: Path) -> None:
    from microbench import choose

    path = tmp_path / "choices.json"
    path.write_text('{"format": 1, "architectures": {"sm_80": {"measured": {}, "entries": []}}}')
    machine = {"architecture": "sm_90", "gpu": "a GPU", "torch": "2.11", "commit": "abc"}
    result = {"machine": machine, "rows": [row(2e-3, 1e-3), row(1e-3, 2e-3, rank=64), row(1e-3, None)]}
    assert choose.write(result, path) == 2
    table = load(path)
    assert [entry.winner for entry in table["sm_90"]] == ["cuda", "triton"]
    assert table["sm_80"] == [], "others stay"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["choices.json"]
    lines = choose.table(path)
    assert "gpu a GPU" in "\n".join(lines)
    assert lines[-1].split() == ["bfloat16", "64", "32", "64", "128", "1.000", "2.000", "triton"]
    before = path.read_text()
    with pytest.raises(ValueError, match="expected rows with both triton and cuda, got none"):
        choose.write({"machine": machine, "rows": [row(1e-3, None)]}, path)
    assert path.read_text() == before


def test_show_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    import suite
    from microbench import choose

    assert suite.main(["choose", "--show"]) == 0
    assert capsys.readouterr().out.splitlines() == choose.table()
