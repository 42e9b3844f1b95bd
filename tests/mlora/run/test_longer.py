"""Adapters that have made all their steps go on when `max_steps` is raised at a resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlora
import pytest
from mlora.config.config_file import resolve_config
from mlora.errors import RunError
from mlora.run.handoff.export import export_adapter
from mlora.run.run import resume
from mlora.store.run_folder import RunFolder, read_metrics

from tests.mlora.command_line import invoke
from tests.mlora.limited_runs import Watching, interrupt
from tests.mlora.tiny_run import lines, run_data, weights


def config_of(base: Path, folder: Path, name: str, steps: int, **defaults: Any) -> Any:
    """Two adapters that take equal numbers of iterations, without evaluations."""
    data = run_data(base, folder, output_dir=str(folder / name))
    data["defaults"] |= {"max_steps": steps, "lr_scheduler_type": "constant"} | defaults
    first, second = data["adapters"]
    del first["eval_dataset"], first["eval_steps"], second["max_steps"]
    first["gradient_accumulation_steps"] = second["gradient_accumulation_steps"] = 2
    return resolve_config(data, folder=folder)


def rates(folder: Path, name: str) -> list[float]:
    records = read_metrics(folder / "metrics.jsonl")
    return [record["learning_rate"] for record in records if record["adapter"] == name]


@pytest.fixture(scope="module")
def short(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four steps that has finished."""
    folder = tmp_path_factory.mktemp("short")
    assert mlora.train(config_of(tiny_base, folder, "run", 4)).status == "finished"
    return folder / "run"


def test_longer_training_is_that_of_a_run_with_more_steps(
    short: Path, tiny_base: Path, tmp_path: Path
) -> None:
    """With a constant schedule, byte for byte: metrics and weights; also when it is killed on the way."""
    run = shutil.copytree(short, tmp_path / "run")
    done = invoke("resume", run, "--set", "defaults.max_steps=7")
    assert done.exit_code == 0, done.stderr
    assert "first: goes on from step 4 to step 7" in done.stdout
    assert "waiting for memory" not in done.stdout
    whole = mlora.train(config_of(tiny_base, tmp_path, "whole", 7))
    assert whole.status == "finished"
    assert weights(run) == weights(tmp_path / "whole")
    assert lines(run) == lines(tmp_path / "whole")
    assert weights(run) != weights(short)
    config = RunFolder(run).read_config()
    assert [config.defaults.max_steps, *(one.max_steps for one in config.adapters)] == [7, 7, 7]
    watching = Watching({("second", 8): interrupt})
    assert resume(run, settings=["defaults.max_steps=9"], reporter=watching).status == "interrupted"
    assert resume(run).status == "finished"
    mlora.train(config_of(tiny_base, tmp_path, "nine", 9))
    assert weights(run) == weights(tmp_path / "nine")


def test_one_adapter_goes_on_alone(short: Path, tmp_path: Path) -> None:
    run = shutil.copytree(short, tmp_path / "run")
    assert resume(run, settings=["adapters.second.max_steps=6"]).status == "finished"
    summary = RunFolder(run).read_summary()
    assert summary is not None
    found = {name: (one["step"], one["max_steps"]) for name, one in summary["adapters"].items()}
    assert found == {"first": (4, 4), "second": (6, 6)}
    before, after = weights(short), weights(run)
    assert (before["first"] == after["first"], before["second"] == after["second"]) == (True, False)
    assert resume(run, settings=["adapters.first.max_steps=5"]).status == "finished"


def test_the_schedule_is_that_of_the_new_total(tiny_base: Path, tmp_path: Path) -> None:
    """As in Transformers' Trainer: the rate jumps to where the longer schedule is."""
    config = config_of(tiny_base, tmp_path, "run", 4, lr_scheduler_type="linear")
    assert mlora.train(config).status == "finished"
    assert resume(tmp_path / "run", settings=["defaults.max_steps=8"]).status == "finished"
    short = [5e-3 * (1 - step / 4) for step in range(4)]
    longer = [5e-3 * (1 - step / 8) for step in range(4, 8)]
    assert rates(tmp_path / "run", "first") == pytest.approx([*short, *longer])


def test_the_best_weights_so_far_still_count(tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path, save_total_limit=1)
    data["adapters"] = data["adapters"][:1]
    data["adapters"][0] |= {"eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 0.5}
    assert mlora.train(resolve_config(data, folder=tmp_path)).status == "finished"
    first = RunFolder(tmp_path / "run").read_summary()
    result = resume(tmp_path / "run", settings=["adapters.first.max_steps=10"])
    assert result.status == "finished"
    steps = {
        r["step"]: r["eval_loss"]
        for r in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if "eval_loss" in r
    }
    steps.pop(0)
    assert result.adapters["first"].saved_step == min(steps, key=lambda step: steps[step])
    assert first is not None
    assert result.adapters["first"].step == 10


def test_checkpoints_of_before_keep_what_they_held(short: Path, tmp_path: Path) -> None:
    run = shutil.copytree(short, tmp_path / "run")
    watching = Watching({("first", 5): interrupt})
    assert resume(run, settings=["defaults.max_steps=7"], reporter=watching).status == "interrupted"
    now = export_adapter(run, "first", output=tmp_path / "now")
    assert now.weights.step == 5
    then = export_adapter(run, "first", checkpoint=8, output=tmp_path / "then")
    assert then.weights.step == 4
    assert (then.folder / "adapter_model.safetensors").read_bytes() == weights(short)["first"]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (
            "adapters.first.max_steps=3",
            "--set: adapters[0].max_steps can only be raised once a run has begun",
        ),
        ("defaults.max_steps=3", "--set: defaults.max_steps can only be raised once a run has begun"),
        ("adapters.first.max_steps=4", "the run has ended, so --set changes nothing; remove it"),
        ("adapters.firts.max_steps=9", "no item is named 'firts'; did you mean 'first'?"),
    ],
)
def test_what_cannot_be_longer(short: Path, setting: str, expected: str) -> None:
    with pytest.raises(RunError) as caught:
        resume(short, settings=[setting])
    assert expected in str(caught.value)


def test_a_state_that_is_gone_is_named(short: Path, tmp_path: Path) -> None:
    run = shutil.copytree(short, tmp_path / "run")
    shutil.rmtree(run / "finished")
    with pytest.raises(RunError) as caught:
        resume(run, settings=["defaults.max_steps=7"])
    assert str(caught.value) == (
        f"first: cannot be trained longer: its optimizer's state is not in {run / 'finished'}; begin a new "
        f"task with init_from: {run / 'adapters' / 'first'}"
    )
    assert RunFolder(run).read_config().adapters[0].max_steps == 4
    assert resume(run).status == "finished"


def test_a_state_with_a_flipped_bit_is_refused(short: Path, tmp_path: Path) -> None:
    run = shutil.copytree(short, tmp_path / "run")
    path = min((run / "finished").glob("first-*.pt"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    before = weights(run)
    said = (
        f"first: cannot be trained longer: {path}: cannot be read: it is damaged or incomplete; begin a new"
    )
    with pytest.raises(RunError, match=f"^{said} task with init_from: "):
        resume(run, settings=["defaults.max_steps=7"])
    assert weights(run) == before


def test_data_that_changed_since_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    assert mlora.train(config_of(tiny_base, tmp_path, "run", 2)).status == "finished"
    with open(tmp_path / "one.jsonl", "a") as file:
        file.write('{"input_ids": [4, 5, 6]}\n')
    with pytest.raises(RunError, match=r"first: its data .* changed since the checkpoint"):
        resume(tmp_path / "run", settings=["defaults.max_steps=3"])


def test_an_adapter_that_was_stopped_early_does_not_go_on(tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0] |= {"eval_steps": 1, "early_stopping_patience": 1, "early_stopping_threshold": 9.0}
    first = mlora.train(resolve_config(data, folder=tmp_path)).adapters["first"]
    assert first.message.startswith("stopped early")
    told = Watching()
    settings = ["adapters.first.max_steps=20", "adapters.second.max_steps=10"]
    result = resume(tmp_path / "run", settings=settings, reporter=told)
    assert (result.adapters["first"].step, result.adapters["second"].step) == (first.step, 10)
    (line,) = [line for line in told.lines if "does not go on" in line]
    told_of = f"it was finished at step {first.step}: stopped early"
    assert line.startswith(f"first: does not go on with the larger max_steps: {told_of}")
    with pytest.raises(RunError, match="a larger max_steps is for adapters that had made all their steps"):
        resume(tmp_path / "run", settings=["adapters.first.max_steps=30"])
