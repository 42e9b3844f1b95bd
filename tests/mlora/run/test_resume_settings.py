"""`mlora resume --set`: keys that may change when a run goes on, and lines for the others."""

from __future__ import annotations

from pathlib import Path

import mlora
import pytest
from mlora.config.config_file import resolve_config
from mlora.errors import RunError
from mlora.run.resumed_config import resumed_config
from mlora.run.run import resume
from mlora.store.checkpoint import list_checkpoints
from mlora.store.run_folder import RunFolder

from tests.mlora.command_line import invoke, only_line
from tests.mlora.limited_runs import Watching, ask, interrupt
from tests.mlora.tiny_run import lines, run_data, weights


@pytest.fixture
def begun(tiny_base: Path, tmp_path: Path) -> Path:
    """The folder of a run that was interrupted in the middle."""
    config = resolve_config(run_data(tiny_base, tmp_path), folder=tmp_path)
    assert mlora.train(config, reporter=Watching({("first", 3): interrupt})).status == "interrupted"
    return tmp_path / "run"


def test_what_changes_no_result_may_change(begun: Path, tiny_base: Path, tmp_path: Path) -> None:
    before = len(list_checkpoints(begun / "checkpoints"))
    settings = ["save_total_limit=9", "adapters.first.save_steps=1", f"data_cache={tmp_path / 'cache'}"]
    settings.append("dataset_num_proc=3")
    done = invoke("resume", begun, *(word for setting in settings for word in ("--set", setting)))
    assert done.exit_code == 0, done.stderr
    config = RunFolder(begun).read_config()
    assert (config.save_total_limit, config.adapters[0].save_steps) == (9, 1)
    assert (config.data_cache, config.dataset_num_proc) == (str(tmp_path / "cache"), 3)
    assert len(list_checkpoints(begun / "checkpoints")) > before + 2
    whole = run_data(tiny_base, tmp_path, output_dir=str(tmp_path / "whole"))
    mlora.train(resolve_config(whole, folder=tmp_path))
    assert lines(begun) == lines(tmp_path / "whole")
    assert weights(begun) == weights(tmp_path / "whole")


def test_the_stages_may_change(begun: Path) -> None:
    """Their cut, which the run has saved, is measured anew; and again without stages."""
    settings = ["pipeline.stages=2"]
    told = Watching({("first", 5): interrupt})
    assert resume(begun, settings=settings, reporter=told).status == "interrupted"
    pipeline = RunFolder(begun).read_config().pipeline
    assert (pipeline.stages, pipeline.partition) == (2, [1, 1])
    assert resumed_config(RunFolder(begun), ["pipeline.stages=1"]).pipeline.partition is None
    assert resume(begun, settings=["pipeline.stages=1"]).status == "finished"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (
            "adapters.first.max_steps=3",
            "--set: adapters[0].max_steps can only be raised once a run has begun",
        ),
        (
            "adapters.first.lora.r=8",
            "--set: adapters[0].lora.r cannot change once a run has begun, only",
        ),
        ("seed=4", "; start a new run, with init_from to go on from an adapter"),
        ("defaults.save_steps=1", "each adapter has its own save_steps by now; set adapters.NAME.save_steps"),
        ("output_dir=elsewhere", "--set output_dir=elsewhere: move the run's folder instead, and resume it"),
        ("save_total_limit=0", "--set save_total_limit=0: save_total_limit: must be at least 1, got 0"),
        ("adapters.third.save_steps=1", "no item is named 'third'; items: first, second, or 0 to 1"),
        ("savesteps", "--set savesteps: must be key=value"),
    ],
)
def test_other_settings_are_one_line(trained: Path, setting: str, expected: str) -> None:
    before = (trained / "config.yaml").read_bytes()
    assert expected in only_line(invoke("resume", trained, "--set", setting))
    assert (trained / "config.yaml").read_bytes() == before


def test_options_that_are_called_as_free_keys_are_not_free(tiny_base: Path, tmp_path: Path) -> None:
    """What may change is told by the whole path."""
    (tmp_path / "named.py").write_text(
        "def loss(rows, priority=1.0, scheduler=None):\n    return -priority * rows.sums()\n"
    )
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0]["objective"] = {"name": "named:loss", "priority": 1.0}
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.write_config(resolve_config(data, folder=tmp_path))
    for key, value in (("priority", 5.0), ("scheduler", "{a: 1}")):
        with pytest.raises(RunError) as error:
            resumed_config(folder, [f"adapters.first.objective.{key}={value}"])
        line = str(error.value)
        assert line.startswith(
            f"--set: adapters[0].objective.{key} cannot change once a run has begun, only "
        )
        for free in ("adapters.NAME.priority, adapters.NAME.save_steps", " device,", " pipeline,"):
            assert free in line
        assert "sweep" not in line
    assert resumed_config(folder, ["adapters.first.priority=5"]).adapters[0].priority == 5


def test_a_run_with_paused_tasks_only_says_so(tiny_base: Path, tmp_path: Path) -> None:
    data, run = run_data(tiny_base, tmp_path), tmp_path / "run"
    data["adapters"] = data["adapters"][:1]
    told = Watching({("first", 2): lambda: ask(run, "pause", "first")})
    assert mlora.train(resolve_config(data, folder=tmp_path), reporter=told).status == "paused"
    line = only_line(invoke("resume", run, "--set", "save_total_limit=9"))
    assert line == (
        f"error: {run}: only paused tasks remain, so nothing goes on with --set; first "
        f"`mlora unpause {run} first`"
    )
    done = invoke("resume", run)
    assert "the run had ended" not in done.stdout
    assert "only paused tasks remain; continue with `mlora unpause" in done.stdout
    ask(run, "unpause", "first")
    assert resume(run, settings=["save_total_limit=9"]).status == "finished"
    assert RunFolder(run).read_config().save_total_limit == 9


def test_a_run_that_has_ended_takes_none(trained: Path) -> None:
    line = only_line(invoke("resume", trained, "--set", "save_total_limit=9"))
    assert line == f"error: {trained}: the run has ended, so --set changes nothing; remove it"
    with pytest.raises(RunError, match="the run has ended, so --set changes nothing"):
        resume(trained, settings=["save_total_limit=9"])
