"""The benchmark of one layer ends with an error where its results do not show what they should."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


def row(ours: float, must: float | None, processors: float, packed: float | None = None) -> dict[str, Any]:
    ratios = {"peft": 3.0, "ours": ours}
    return {
        "shape": (512, 1024, 1024, 8),
        "dtype": "float32",
        "must": must,
        "ratio_to_frozen": ratios if packed is None else ratios | {"ours_packed": packed},
        "processors": {"peft": 1.1, "ours": processors},
    }


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(1.1, 1.12, 1.95), row(5.0, None, 1.9)], []),
        ([row(1.1, 1.12, 1.95), row(1.2, 1.12, 1.9)], ["missed: 512x1024x1024x8 float32: plain 1.200 of"]),
        ([row(1.1, 1.12, 1.95), row(1.1, 1.12, 1.7)], ["SOMETHING ELSE RAN"]),
        (
            [row(1.2, 1.12, 2.0, packed=1.1)],
            ["missed: 512x1024x1024x8 float32: plain 1.200, packed 1.100 of"],
        ),
        ([row(1.2, 1.12, 1.7)], ["missed: ", "SOMETHING ELSE RAN"]),
    ],
)
def test_faults(rows: list, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from linear import command

    found = command.faults(rows, threads=2)
    assert len(found) == len(expected)
    assert all(fault.startswith(start) for fault, start in zip(found, expected, strict=True))


def test_exit_code_after_results_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from linear import command

    monkeypatch.setattr(command, "faults", lambda *_: ["missed: it"])
    monkeypatch.setattr(command, "copy_speed", lambda: 1e10)
    out = str(tmp_path / "one")
    options = ["--shapes", "8x16x16x2", "--dtype", "float32", "--rounds", "1", "--out", out]
    options += ["--threads", str(torch.get_num_threads())]
    monkeypatch.setattr(sys, "argv", ["bench_linear.py", *options])
    with pytest.raises(SystemExit, match="missed: it"):
        command.main()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json", "one.png", "one.txt"]
    assert (tmp_path / "one.txt").read_text().endswith("missed: it\n")
    monkeypatch.setattr(command, "faults", lambda *_: [])
    command.main()
