"""The source archive holds every file of the repository, and the wheel every example."""

import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from setuptools.command.egg_info import FileList

ROOT = Path(__file__).parents[1]


def tracked(*folders: str) -> set[str]:
    """The files that git knows; skips the test outside a git checkout."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--", *folders]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if done.returncode:
        pytest.skip("not a git checkout")
    return {name for name in done.stdout.split("\0") if name and (ROOT / name).exists()}


def test_the_source_archive_holds_every_file(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tracked()
    monkeypatch.chdir(ROOT)
    found = FileList()
    for line in Path("MANIFEST.in").read_text().splitlines():
        if line and not line.startswith("#"):
            found.process_template_line(line)
    # setuptools adds these by itself
    files = {*found.files, "LICENSE", "README.md", "pyproject.toml", "setup.py"}
    assert expected - files == set()
    assert {name for name in files if name.endswith((".so", ".pyc"))} == set()


def test_the_wheel_holds_what_the_package_reads() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {name.removeprefix("python/mlora/") for name in tracked("python/mlora")}
    names = {name for name in found if not name.endswith(".py")}
    assert {"config/aliases.yaml", "report/page.html", "report/page.css", "report/page.js"} <= names
    patterns = settings["package-data"]["mlora"]
    missing = {n for n in names if not any(fnmatch(n, p) and n.count("/") == p.count("/") for p in patterns)}
    assert missing == set()


def test_the_wheel_holds_every_example() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["package-dir"]["mlora.examples"] == "examples"
    patterns = [*settings["package-data"]["mlora.examples"], "*.py"]
    names = {name.removeprefix("examples/") for name in tracked("examples")}
    assert len(names) > 30
    # setuptools' patterns do not cross folders
    missing = {n for n in names if not any(fnmatch(n, p) and n.count("/") == p.count("/") for p in patterns)}
    assert missing == set()
