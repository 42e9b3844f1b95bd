"""A disk that fills up, or fails, while a run's own files are written: one line, exit code 1, nothing lost.

Adapters, and checkpoints that training waits for, are in test_resume.py.
"""

import builtins
import errno
import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from full_disk import fill_disk
from mlora.cli.app import app
from mlora.store.checkpoint import list_checkpoints
from tiny_run import lines, run_data, weights, write_run
from typer.testing import CliRunner
from watched_disk import watch_disk, writing_threads

Fill = Callable[[str, int], None]

pytestmark = pytest.mark.draws


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> Fill:
    """The disk is full when a file is written for the n-th time."""

    def fill(name: str, time: int = 1) -> None:
        times = []

        def is_full(path: Path) -> bool:
            times.append(path.name == name)
            return times[-1] and sum(times) == time

        fill_disk(monkeypatch, is_full)

    return fill


@pytest.fixture
def run_file(tiny_base: Path, tmp_path: Path) -> Path:
    """A run into the folder `run`; a run of the same config that nothing disturbed is in `whole`."""
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    assert (
        CliRunner().invoke(app, ["train", str(path), "--set", f"output_dir={tmp_path}/whole"]).exit_code == 0
    )
    return path


def fails(*arguments: object) -> str:
    """The one line that a command fails with."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 1
    assert "Traceback" not in result.stderr
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("error: "))
    return line


def resumes(tmp_path: Path) -> None:
    """The run continues to what it would have been."""
    assert CliRunner().invoke(app, ["resume", f"{tmp_path}/run"]).exit_code == 0
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_config(run_file: Path, tmp_path: Path, fill: Fill) -> None:
    fill("config.yaml", 1)
    expected = f"error: {tmp_path}/run/config.yaml: cannot be saved: No space left on device"
    assert fails("train", run_file) == expected
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]  # only the lock
    assert CliRunner().invoke(app, ["train", str(run_file)]).exit_code == 0
    before = (tmp_path / "run" / "config.yaml").read_bytes()
    fill("config.yaml", 1)
    assert fails("train", run_file, "--overwrite", "--set", "seed=9") == expected
    assert (tmp_path / "run" / "config.yaml").read_bytes() == before


# it is written at the start, when an adapter ends (twice here), and at the end
@pytest.mark.parametrize("time", [1, 2, 4])
def test_summary(run_file: Path, tmp_path: Path, fill: Fill, time: int) -> None:
    fill("summary.json", time)
    summary = tmp_path / "run" / "summary.json"
    assert fails("train", run_file) == f"error: {summary}: cannot be saved: No space left on device"
    assert summary.is_file() == (time > 1)
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert len(list_checkpoints(tmp_path / "run" / "checkpoints")) == min(time - 1, 1) * 2
    assert len(weights(tmp_path / "run")) == {1: 0, 2: 1, 4: 2}[time]
    resumes(tmp_path)


@pytest.mark.parametrize(("iteration", "before"), [(2, []), (4, [2]), (12, [6, 8])])
def test_checkpoint(
    run_file: Path,
    tmp_path: Path,
    fill: Fill,
    monkeypatch: pytest.MonkeyPatch,
    iteration: int,
    before: list[int],
) -> None:
    """While training goes on: it is made to take a step, or to end a task, before the disk is full."""
    path = tmp_path / "run" / "checkpoints" / f"step-{iteration:08d}.pt"
    held = []

    def told(what: str, synced: Path) -> None:
        if synced.name == "metrics.jsonl" and len(list_checkpoints(path.parent)) == len(before):
            held.append(synced.stat().st_size)
            end = time.monotonic() + 2  # it may have gone on for as far as it can already
            while synced.stat().st_size == held[-1] and time.monotonic() < end:
                time.sleep(0.001)

    with monkeypatch.context() as patch:
        watch_disk(patch, told)
        fill(path.name)
        intact = "; earlier checkpoints are intact" if before else ""
        assert fails("train", run_file) == f"error: {path}: cannot be saved: No space left on device{intact}"
    assert held
    assert [old.name for old in list_checkpoints(path.parent)] == [f"step-{n:08d}.pt" for n in before]
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert writing_threads() == []
    resumes(tmp_path)


def test_plot(run_file: Path, tmp_path: Path, fill: Fill) -> None:
    fill("loss.png", 1)
    plot = tmp_path / "run" / "loss.png"
    assert fails("train", run_file) == f"error: {plot}: cannot be saved: No space left on device"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "adapters",
        "checkpoints",
        "config.yaml",
        "environment.json",
        "finished",
        "metrics.jsonl",
        "queue.sqlite",
        "summary.json",
    }
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    fill("loss.png", 1)
    assert fails("resume", plot.parent) == f"error: {plot}: cannot be saved: No space left on device"
    fill("loss.png", 2)
    resumes(tmp_path)


def test_metrics_that_cannot_be_written(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run" / "metrics.jsonl"

    class Filling(io.FileIO):
        def write(self, data: Any) -> int:
            room = 3000 - self.tell()
            return super().write(bytes(data)[:room])  # as a disk does that fills up in the middle of a line

    def opened(path: Path, mode: str, **options: Any) -> Any:
        return Filling(path, "a") if mode == "ab" else builtins.open(path, mode, **options)

    monkeypatch.setattr("mlora.store.disk.open", opened, raising=False)
    assert fails("train", run_file) == f"error: {path}: cannot be written: No space left on device"
    assert path.stat().st_size == 3000
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")[: len(lines(tmp_path / "run"))]
    assert list_checkpoints(tmp_path / "run" / "checkpoints")
    monkeypatch.undo()
    resumes(tmp_path)


def test_metrics_that_the_disk_does_not_keep(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    sync = os.fsync

    def failing(descriptor: int) -> None:
        checkpoints = list_checkpoints(tmp_path / "run" / "checkpoints")
        if checkpoints and os.path.samestat(os.fstat(descriptor), path.stat()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    assert fails("train", run_file) == f"error: {path}: cannot be written: Input/output error"
    assert len(list_checkpoints(tmp_path / "run" / "checkpoints")) == 1
    monkeypatch.undo()
    resumes(tmp_path)
