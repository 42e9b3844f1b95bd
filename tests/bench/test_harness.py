"""The entry of all benchmarks, and what they share: targets, turns, and what is written."""

import argparse
import json
import subprocess
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def harness(bench_folder: Path) -> Any:
    return import_module("shared.harness")


def test_every_name_has_a_benchmark(bench_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, bench_folder / "__main__.py"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    spec = spec_from_file_location("bench_entry", bench_folder / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    entry = module_from_spec(spec)
    spec.loader.exec_module(entry)
    for name, (module, about) in entry.BENCHMARKS.items():
        assert f"{name:16} {about}" in done.stdout
        text = (bench_folder / f"{module.replace('.', '/')}.py").read_text()
        assert "\ndef main(" in text, module
    wrong = [sys.executable, bench_folder / "__main__.py", "nonsense"]
    assert subprocess.run(wrong, capture_output=True, timeout=60).returncode == 2


@pytest.mark.parametrize(
    ("value", "least", "most", "met"),
    [
        (2.0, 2.0, None, True),
        (1.9, 2.0, None, False),
        (1.9, None, 2.0, True),
        (float("nan"), None, 2.0, False),
        (0.2, 0.2, 0.5, True),
        (-0.04, -0.03, 0.03, False),
        (9.0, None, None, True),
        (None, None, 1.0, False),
    ],
)
def test_targets(
    harness: Any, value: float | None, least: float | None, most: float | None, met: bool
) -> None:
    assert harness.Target("it", value, least, most).met == met


def test_what_is_judged_and_written(
    harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missed target is named after the results are written; `--quick` judges and writes nothing unasked."""

    def measure(options: argparse.Namespace) -> Any:
        must = [harness.Target("a", 0.9, least=0.9), harness.Target("b", 2.0, most=1.0)]
        panel = harness.Panel("seconds", {"one": {"x": 1.0}, "two": {"x": 2.0, "y": 3.0}})
        return harness.Found({"turns": options.turns}, ["a line"], must, [panel])

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["python -m bench it", *words])
        return int(harness.measured("About.", measure, out="never", threads=1))

    out = str(tmp_path / "one")
    assert run("--out", out) == 1
    assert "missed: b" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"one.json", "one.png", "one.txt"}
    assert "MISSED  b: 2 (must be at most 1)" in (tmp_path / "one.txt").read_text()
    data = json.loads((tmp_path / "one.json").read_text())
    assert data["machine"]["command"] == f"python -m bench it --out {out}"
    assert [line["met"] for line in data["must"]] == [True, False]
    assert data["turns"] == 5
    assert run("--quick") == 0
    assert "MISSED" not in capsys.readouterr().out


def test_turns_go_back_and_forth(bench_folder: Path) -> None:
    timing = import_module("shared.timing")
    calls: list[str] = []
    cases = {name: lambda name=name: calls.append(name) for name in "abc"}
    found = timing.alternate(cases, 2, warm_up=1)
    assert "".join(calls) == "abccbaabc"
    assert [list(turn) for turn in found] == [["a", "b", "c"]] * 2
    pair = [{"a": {"seconds": 1.0}, "b": {"seconds": 4.0}}, {"a": {"seconds": 3.0}, "b": {"seconds": 6.0}}]
    assert timing.ratio(pair, "b", "a") == 3.0
    told = timing.timed(lambda: {"part": 2.0})
    assert told["part"] == 2.0
    assert timing.medians([{"a": told}])["a"]["part"] == 2.0
