"""Output that goes away while a command writes to it: a closed pipe, a full disk, no output at all."""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest
from mlora.cli.app import app
from tiny_run import run_data, write_run


@pytest.fixture(params=["Broken pipe", "No space left on device"])
def broken(request: pytest.FixtureRequest) -> Iterator[tuple[TextIO, str]]:
    """A stream that cannot be written, and why."""
    if request.param == "Broken pipe":
        reader, writer = os.pipe()
        os.close(reader)
        stream = os.fdopen(writer, "w")
    else:
        stream = open("/dev/full", "w")  # noqa: SIM115 - closed below
    yield stream, request.param
    stream.close()  # with what it still held, which would fail here


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run a command with its output going elsewhere."""

    def run(stdout: TextIO | None, *arguments: object) -> int:
        monkeypatch.setattr(sys, "stdout", stdout)
        code = app([str(argument) for argument in arguments], standalone_mode=False)
        assert sys.stdout is stdout
        return code or 0

    return run


def test_training_goes_on(
    call: Callable[..., int],
    broken: tuple[TextIO, str],
    tiny_base: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stream, reason = broken
    assert call(stream, "train", write_run(tmp_path, run_data(tiny_base, tmp_path))) == 0
    assert capfd.readouterr().err == (
        f"warning: standard output: cannot be written: {reason}; the run continues, "
        "and `mlora status` shows it\n"
    )
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 6 + 9 + 3


def test_other_commands_end(
    call: Callable[..., int],
    broken: tuple[TextIO, str],
    trained: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stream, reason = broken
    assert call(stream, "status", trained) == 1
    assert capfd.readouterr().err == f"error: standard output: cannot be written: {reason}\n"


def test_both_outputs_gone(
    call: Callable[..., int], broken: tuple[TextIO, str], tiny_base: Path, tmp_path: Path
) -> None:
    stream, _ = broken
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    with open(os.dup(stream.fileno()), "w") as other, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", other)
        assert call(stream, "train", path) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


def test_an_error_is_told_before_the_output_is(
    call: Callable[..., int],
    broken: tuple[TextIO, str],
    tiny_base: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stream, _ = broken
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    assert call(stream, "validate", path, "--set", "sede=1") == 1
    assert capfd.readouterr().err == "error: --set sede=1: sede: unknown key; did you mean 'seed'?\n"


def test_no_output_at_all(call: Callable[..., int], trained: Path, tiny_base: Path, tmp_path: Path) -> None:
    assert call(None, "status", trained) == 0
    assert call(None, "train", write_run(tmp_path, run_data(tiny_base, tmp_path))) == 0


def test_letters_that_the_output_does_not_know_are_escaped(
    call: Callable[..., int], tiny_base: Path, tmp_path: Path
) -> None:
    """With an ASCII terminal a run with such a path ended in a traceback, after all its training."""
    folder = tmp_path / "é"
    folder.mkdir()
    path = write_run(folder, run_data(tiny_base, folder))
    with open(tmp_path / "train", "w", encoding="ascii") as stdout:
        assert call(stdout, "train", path) == 0
    assert "\\xe9" in (tmp_path / "train").read_text().splitlines()[-1]
    with open(tmp_path / "generate", "w", encoding="ascii") as stdout:
        prompt = ("generate", folder / "run", "-p", "é", "--max-new-tokens", 1)
        assert call(stdout, *prompt) == 0
        assert call(stdout, *prompt, "--json") == 0
    text, _, *answers = (tmp_path / "generate").read_text().splitlines()
    assert text.startswith("[first] \\xe9")
    assert [json.loads(answer)["prompt"] for answer in answers] == ["é", "é"]


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m[red]a[/red]\r\u202e"
SEEN = r"\x1b]0;owned\x07\x1b[2J\x9b31m[red]a[/red]\r\u202e"


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_foreign_text_cannot_steer_a_terminal(
    call: Callable[..., int],
    trained: Path,
    tmp_path: Path,
    kind: type[io.StringIO],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Names and messages in the files of a run, in tables, lines and errors."""
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    summary = json.loads((folder / "summary.json").read_text())
    entry = summary["adapters"]["second"] | {"state": "refused", "message": HOSTILE}
    (folder / "summary.json").write_text(
        json.dumps(summary | {"adapters": {"first": entry, "second": entry}})
    )
    record = {"adapter": HOSTILE, "step": 1, "loss": 1.0, "tokens": 1, "seconds": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    monkeypatch.setenv("COLUMNS", "300")
    out = kind()
    assert call(out, "status", folder) == 0
    shown = out.getvalue()
    assert shown.count(SEEN) == 3  # the row of the metrics' adapter, and two messages
    assert call(kind(), "status", folder / HOSTILE) == 1
    shown += capfd.readouterr().err
    assert shown.count(SEEN) == 4
    assert not any(part in shown for part in ("\x1b]", "\x1b[2J", "\x9b", "\u202e", "\x07"))
