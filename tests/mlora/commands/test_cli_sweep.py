"""`mlora sweep`, and other commands of a run with a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from limited_runs import Watching
from mlora.commands.status import read_status
from mlora.config_file import resolve_config
from mlora.run_folder import RunFolder
from mlora.sweep.ranking import rank_trials
from sweep_data import sweep_data
from sweep_runs import RATES, sweep, table
from tiny_run import write_run


@pytest.fixture
def data(tiny_base: Path, tmp_path: Path) -> dict[str, Any]:
    return sweep_data(tiny_base, tmp_path, search=RATES)


def test_commands(data: dict[str, Any], tmp_path: Path, run: Any) -> None:
    path = write_run(tmp_path, data)
    wrong = run("train", path)
    assert wrong.exit_code == 1
    assert "holds a sweep; start it with `mlora sweep`" in wrong.output
    checked = run("validate", path)
    assert checked.exit_code == 0
    assert "a sweep of 8 trials, 3 at once; 3 samples of its search space are ready" in checked.output
    done = run("sweep", path)
    assert done.exit_code == 0
    ranked = rank_trials(RunFolder(tmp_path / "run"), resolve_config(data, folder=tmp_path).sweep)  # type: ignore[arg-type]
    assert f"1     {ranked[0].name}  finished" in done.output
    assert f"best: {tmp_path / 'run' / 'best'}" in done.output
    assert (tmp_path / "run" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    again = run("resume", tmp_path / "run")
    assert again.exit_code == 0
    assert f"1     {ranked[0].name}  finished" in again.output
    shown = run("status", tmp_path / "run")
    assert shown.exit_code == 0
    assert "trial-7" in shown.output
    assert run("sweep", path, "--overwrite").exit_code == 0


def test_status_says_how_far_it_has_come(data: dict[str, Any], tmp_path: Path, run: Any) -> None:
    folder = tmp_path / "run"
    seen: list[dict[str, Any]] = []

    def look() -> None:
        seen.append(read_status(folder).as_json()["sweep"])

    sweep(data, tmp_path, reporter=Watching({("trial-0", 2): look, ("trial-4", 2): look}))
    assert seen[0] == {"begun": 3, "trials": 8, "best": None}
    assert seen[1]["begun"] >= 5
    assert seen[1]["best"]["trial"] in {"trial-0", "trial-1", "trial-2"}
    best = table(folder)[0]
    shown = run("status", folder).output
    assert f"sweep: 8 of 8 trials begun; best so far {best['trial']}, eval_loss" in shown
    assert f"lora.r {best['lora.r']}" in shown


def test_a_submitted_task_has_no_trials_name(data: dict[str, Any], tmp_path: Path, run: Any) -> None:
    sweep(data, tmp_path)
    lora = {"r": 2, "target_modules": "all-linear"}
    (tmp_path / "task.yaml").write_text(yaml.safe_dump({"name": "trial-9", "dataset": "one", "lora": lora}))
    refused = run("submit", tmp_path / "run", tmp_path / "task.yaml")
    assert refused.exit_code == 1
    assert "trial-9 is a name of the sweep's trials" in refused.output
    (tmp_path / "task.yaml").write_text(
        yaml.safe_dump({"name": "extra", "dataset": "one", "max_steps": 2, "lora": lora})
    )
    assert run("submit", tmp_path / "run", tmp_path / "task.yaml").exit_code == 0
    again = run("resume", tmp_path / "run")
    assert again.exit_code == 0
    assert len(table(tmp_path / "run")) == 8
    shown = again.stdout.splitlines()
    title = next(place for place, line in enumerate(shown) if line.startswith("adapter "))
    assert shown[title + 1].split()[:3] == ["extra", "finished", "2/2"]
    assert shown[title - 1].split()[1].startswith("trial-")  # the last of the trials' own table
