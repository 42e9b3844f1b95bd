"""A run of several stages: what `mlora train` and `mlora resume` start, and what they say in the end."""

import os
import time
from pathlib import Path

import pytest
from command_line import Run
from mlora.store.run_folder import RunFolder
from tiny_run import run_data, write_run

Started = list[tuple[int, list[str]]]


@pytest.fixture
def code() -> int:
    """That the processes end with."""
    return 137


@pytest.fixture
def status() -> str:
    """What the run says of itself when they have ended."""
    return "running"


@pytest.fixture
def started(tmp_path: Path, code: int, status: str, monkeypatch: pytest.MonkeyPatch) -> Started:
    """What a launcher is told, which starts nothing."""
    found: Started = []

    def launch(stages: int, arguments: list[str]) -> int:
        found.append((stages, arguments))
        (tmp_path / "run").mkdir(exist_ok=True)
        folder = RunFolder(tmp_path / "run")
        folder.write_summary({"status": status, "seconds": 1.0, "adapters": {}})
        os.utime(folder.summary, (time.time(),) * 2)  # a system may date files some milliseconds back
        return code

    monkeypatch.setattr("mlora.cluster.launch.launch", launch)
    return found


def test_train_starts_a_process_for_each_stage_of_each_replica(
    run: Run, tiny_base: Path, tmp_path: Path, started: Started
) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    result = run("train", path, "--set", "pipeline.replicas=2", "--stages", 2, "--overwrite", "--trace")
    given = ["--set", "pipeline.replicas=2", "--set", "pipeline.stages=2", "--overwrite", "--trace"]
    assert started == [(4, ["-m", "mlora", "train", str(path), *given])]
    assert result.exit_code == 137
    assert result.stderr == f"continue with: mlora resume {tmp_path / 'run'}\n"


@pytest.mark.parametrize(("code", "status"), [(130, "interrupted"), (1, "finished"), (0, "running")])
def test_a_run_that_was_not_cut_off_says_itself_how_it_ended(
    run: Run, tiny_base: Path, tmp_path: Path, started: Started, code: int
) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path, pipeline={"stages": 2}))
    result = run("train", path)
    assert started == [(2, ["-m", "mlora", "train", str(path)])]
    assert (result.exit_code, result.stderr) == (code, "")


def test_resume(run: Run, tiny_base: Path, tmp_path: Path, started: Started) -> None:
    data = run_data(tiny_base, tmp_path, pipeline={"stages": 3})
    (tmp_path / "run").mkdir()
    write_run(tmp_path, data).rename(tmp_path / "run" / "config.yaml")
    result = run("resume", tmp_path / "run")
    assert started == [(3, ["-m", "mlora", "resume", str(tmp_path / "run")])]
    assert result.exit_code == 137
    assert result.stderr == f"continue with: mlora resume {tmp_path / 'run'}\n"
