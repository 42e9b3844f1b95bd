"""The tutorial's files and commands work, one after the other, with fewer steps than it has."""

import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest
from mlora.cli.app import app
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent.parent
FILE = re.compile(r"^```(?:yaml|python)\n# (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*)$", re.MULTILINE)


def test_the_tutorial_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, content in FILE.findall(text):
        short = content.replace("max_steps: 150", "max_steps: 2").replace("eval_exact_match: true", "")
        (tmp_path / name).write_text(short, encoding="utf-8")
    ran = []
    for line in COMMAND.findall(text):
        words = shlex.split(line)
        if words[0] == "mlora":
            done = CliRunner().invoke(app, words[1:], catch_exceptions=False)
            assert done.exit_code == 0, (line, done.output)
            ran.append(words[1])
        elif words[0] == "python":
            capsys.readouterr()
            runpy.run_path(words[1])
            assert capsys.readouterr().out.startswith("reverse lora = "), line
        else:
            assert subprocess.run(words, capture_output=True, timeout=60, check=True).stdout, line
    assert ran == ["validate", "train", "generate", "submit", "resume"]
    assert sorted(folder.name for folder in (tmp_path / "runs/first/adapters").iterdir()) == [
        "attention",
        "large",
        "small",
    ]
