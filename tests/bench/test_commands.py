"""`mlora bench`, and the program for the sanitizer."""

import sys
from pathlib import Path

import pytest
from mlora.cli.app import app
from typer.testing import CliRunner


def test_mlora_bench_passes_its_arguments_on() -> None:
    done = CliRunner().invoke(app, ["bench", "--help"], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout.startswith("usage: mlora bench")
    assert "linears" in done.stdout
    done = CliRunner().invoke(app, ["bench", "nonsense"], catch_exceptions=False)
    assert done.exit_code == 2


def test_without_the_source_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlora.cli.app.BENCHMARKS", tmp_path)
    done = CliRunner().invoke(app, ["bench", "linears"], catch_exceptions=False)
    assert done.exit_code == 1
    assert done.stderr.startswith(
        "error: bench: the installed package holds no benchmarks; in a source checkout"
    )
    assert len(done.stderr.splitlines()) == 1


def test_sanitize_checks_and_can_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpu import sanitize

    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--device", "cpu"])
    assert sanitize.main() == 0
    assert capsys.readouterr().out.endswith("12 cases, 0 wrong\n")
    monkeypatch.setitem(sanitize.ALLOWED, __import__("torch").bfloat16, 1e-9)
    assert sanitize.main() == 1
    assert "12 cases, 4 wrong" in capsys.readouterr().out
    monkeypatch.setitem(sanitize.BACKENDS, "cpu", ())
    assert sanitize.main() == 1
    assert "nothing was checked" in capsys.readouterr().out
