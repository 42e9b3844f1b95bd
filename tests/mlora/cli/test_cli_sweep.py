"""`mlora sweep`, and what other commands say of its run; with its pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlora.config.config_file import resolve_config
from mlora.store.run_folder import RunFolder
from mlora.sweep.ranking import rank_trials
from sweep_data import sweep_data
from sweep_runs import RATES
from tiny_run import write_run


@pytest.mark.draws
def test_commands(tiny_base: Path, tmp_path: Path, run: Any) -> None:
    # of one rank: what it needs of memory is found once
    search = {"learning_rate": RATES["learning_rate"], "weight_decay": {"choice": [0.0, 0.01, 0.1]}}
    data = sweep_data(tiny_base, tmp_path, trials=5, search=search)
    data["defaults"]["max_steps"] = 3
    path = write_run(tmp_path, data)
    wrong = run("train", path)
    assert wrong.exit_code == 1
    assert "holds a sweep; start it with `mlora sweep`" in wrong.output
    checked = run("validate", path)
    assert checked.exit_code == 0
    assert "a sweep of 5 trials, 3 at once; 3 sample trials are ready to train" in checked.output
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
    assert "trial-4" in shown.output
    assert run("sweep", path, "--overwrite", "--set", "defaults.max_steps=1").exit_code == 0
