"""Sweeps at work: places, pruning, trials that fail, interruptions and kills, and what is left behind."""

from __future__ import annotations

import csv
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from limited_runs import Watching, ask, die, interrupt, limit_for, replace_memory
from mlora.config_file import resolve_config
from mlora.result import RunResult
from mlora.run import resume, train
from mlora.run_folder import RunFolder, read_metrics
from mlora.sweep.ranking import rank_trials
from mlora.task_queue import TaskQueue
from stage_runs import by_adapter, tensors
from test_sweep_space import sweep_data
from tiny_run import lines, weights, write_run

RATES = {"learning_rate": {"low": 1e-4, "high": 5e-2, "log": True}, "lora": {"r": {"choice": [2, 4, 8]}}}
GRID = {"learning_rate": {"choice": [1e-4, 1e-2]}, "lora": {"r": {"choice": [2, 5]}}}


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of each run; `test_commands` draws them."""
    if request.function is not test_commands:
        monkeypatch.setattr("mlora.loop.plot_losses", lambda *_: None)
        monkeypatch.setattr("mlora.sweep.outcome.plot_trials", lambda *_: None)


@pytest.fixture
def data(tiny_base: Path, tmp_path: Path) -> dict[str, Any]:
    return sweep_data(tiny_base, tmp_path, search=RATES)


def sweep(data: dict[str, Any], folder: Path, name: str = "run", reporter: Any = None) -> RunResult:
    return train(resolve_config(data | {"output_dir": name}, folder=folder), reporter=reporter)


def trials_of(run: Path) -> list[dict[str, Any]]:
    """What was proposed, in its order."""
    with TaskQueue(run / "queue.sqlite") as queue:
        return [request.content["trial"] for request in queue.requests() if "trial" in request.content]


def table(run: Path) -> list[dict[str, str]]:
    with open(run / "sweep.csv") as file:
        return list(csv.DictReader(file))


class Crowd(Watching):
    """Notes which adapters step in each iteration."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.places, self.alive = places, set[str]()
        self.most = 0

    def joined(self, task: Any, tasks: Any) -> None:
        self.alive.add(task.name)
        self.most = max(self.most, len(self.alive))
        assert len(self.alive) <= self.places

    def changed(self, task: Any) -> None:
        self.alive.discard(task.name)
        self.lines.append(f"{task.name}: {task.progress.state}")


def test_a_grid_trains_each_trial_as_if_it_were_alone(data: dict[str, Any], tmp_path: Path) -> None:
    data["sweep"] |= {"sampler": "grid", "trials": None, "search": GRID}
    result = sweep(data, tmp_path, reporter=(crowd := Crowd(3)))
    assert result.status == "finished"
    assert crowd.most == 3
    rows = table(tmp_path / "run")
    assert {(row["learning_rate"], row["lora.r"]) for row in rows} == {
        (rate, rank) for rate in ("0.0001", "0.01") for rank in ("2", "5")
    }
    losses = {}
    for row in rows:
        adapter = {
            **data["sweep"]["adapter"],
            "name": row["trial"],
            "seed": 3,
            "learning_rate": float(row["learning_rate"]),
            "lora": {"r": int(row["lora.r"]), "target_modules": "all-linear"},
        }
        own = {**data, "adapters": [adapter], "output_dir": f"alone-{row['trial']}"}
        del own["sweep"]
        alone = train(resolve_config(own, folder=tmp_path))
        losses[row["trial"]] = alone.adapters[row["trial"]].eval_loss["after"]
        assert float(row["eval_loss"]) == pytest.approx(losses[row["trial"]], rel=1e-5)
        found, wanted = by_adapter(tmp_path / "run"), by_adapter(alone.output_dir)
        for record, other in zip(found[row["trial"]], wanted[row["trial"]], strict=True):
            assert record == pytest.approx(other, rel=1e-5, abs=1e-5)
    assert [row["trial"] for row in rows] == sorted(losses, key=lambda name: losses[name] or 0.0)
    assert [row["rank"] for row in rows] == ["1", "2", "3", "4"]
    best = tmp_path / "run" / "adapters" / rows[0]["trial"]
    for file in best.iterdir():
        assert (tmp_path / "run" / "best" / file.name).read_bytes() == file.read_bytes()


def test_a_pruned_trial_frees_its_place_at_the_next_iteration(data: dict[str, Any], tmp_path: Path) -> None:
    data["defaults"]["logging_steps"] = 1
    data["sweep"] |= {"trials": 12, "pruner": "median", "pruner_kwargs": {"n_startup_trials": 2}}
    crowd = Crowd(3)
    assert sweep(data, tmp_path, reporter=crowd).status == "finished"
    rows = table(tmp_path / "run")
    states = Counter(row["state"] for row in rows)
    assert len(rows) == 12
    assert states["pruned"] > 0
    assert set(states) == {"finished", "pruned"}
    assert all(not row["rank"] and int(row["step"]) < 6 for row in rows if row["state"] == "pruned")
    # with each iteration, as many step as there are places, until no trial is left to begin
    steps, last = crowd.steps, max(i for i, (name, _) in enumerate(crowd.steps) if name == "trial-11")
    first = next(i for i, (name, step) in enumerate(steps) if (name, step) == ("trial-11", 1))
    assert first < last
    position, left = 0, len(steps)
    while position < first:
        names = [name for name, _ in steps[position : position + 3]]
        assert len(set(names)) == 3, names
        position += 3
    assert position < left
    for name in (row["trial"] for row in rows if row["state"] == "pruned"):
        assert not (tmp_path / "run" / "adapters" / name).exists()


@pytest.mark.parametrize("pruner", ["none", "median", "successive_halving"])
def test_interrupted_and_killed_sweeps_end_as_undisturbed_ones(
    data: dict[str, Any], tmp_path: Path, pruner: str
) -> None:
    data["sweep"] |= {
        "pruner": pruner,
        "pruner_kwargs": {"n_startup_trials": 2} if pruner == "median" else {},
    }
    data["defaults"]["save_steps"] = 3
    sweep(data, tmp_path, "calm")
    actions: dict[Any, Callable[[], object]] = {7: die, 20: interrupt, 31: die, 44: die}
    run, parts = tmp_path / "run", 0
    begin: Callable[[Watching], RunResult] = lambda watching: sweep(data, tmp_path, "run", watching)  # noqa: E731
    for when, what in [*actions.items(), (10**9, interrupt)]:
        count = len(read_metrics(run / "metrics.jsonl")) if run.exists() else 0
        assert count >= 0
        try:
            status = begin(Watching({max(1, when - 13 * parts): what})).status
        except ConnectionAbortedError:
            status = "died"
        parts += 1
        begin = lambda watching: resume(run, reporter=watching)  # noqa: E731
        if status == "finished":
            break
    assert parts > 2
    assert status == "finished"
    assert trials_of(run) == trials_of(tmp_path / "calm")
    assert lines(run) == lines(tmp_path / "calm")
    assert weights(run) == weights(tmp_path / "calm")
    drop = {"seconds"}
    assert [{k: v for k, v in row.items() if k not in drop} for row in table(run)] == [
        {k: v for k, v in row.items() if k not in drop} for row in table(tmp_path / "calm")
    ]


def test_trials_that_cannot_train_do_not_end_the_sweep(data: dict[str, Any], tmp_path: Path) -> None:
    targets = ["all-linear", "no_such_layer", ["q_proj"]]
    search = {"learning_rate": {"choice": [1e-3, 1e38]}, "lora": {"target_modules": {"choice": targets}}}
    data["sweep"] |= {"sampler": "grid", "trials": None, "search": search}
    result = sweep(data, tmp_path, reporter=(watching := Watching()))
    assert result.status == "finished"
    states = [row["state"] for row in table(tmp_path / "run")]
    assert Counter(states) == {"finished": 2, "stopped": 2, "refused": 2}
    assert states[:2] == ["finished", "finished"]
    assert any("no_such_layer" in line for line in watching.lines)


def test_a_sweep_whose_trials_all_fail(data: dict[str, Any], tmp_path: Path) -> None:
    data["sweep"]["search"] = {"lora": {"target_modules": {"choice": ["nothing", "nowhere"]}}}
    result = sweep(data, tmp_path)
    assert result.status == "failed"
    assert result.exit_code == 1
    assert {row["state"] for row in table(tmp_path / "run")} == {"refused"}
    assert not (tmp_path / "run" / "best").exists()
    assert resume(tmp_path / "run").status == "failed"


def test_a_user_cancels_and_pauses_trials_and_submits_a_task(data: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    actions: dict[Any, Callable[[], object]] = {
        ("trial-0", 2): lambda: ask(run, "cancel", "trial-0"),
        ("trial-1", 2): lambda: ask(run, "pause", "trial-1"),
        ("trial-2", 4): lambda: ask(run, "unpause", "trial-1"),
    }
    watching = Watching(actions)
    assert sweep(data, tmp_path, reporter=watching).status == "finished"
    states = {row["trial"]: row["state"] for row in table(run)}
    assert states.pop("trial-0") == "cancelled"
    assert set(states.values()) == {"finished"}
    assert len(states) == 7


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
    again = resume(tmp_path / "run")
    assert again.adapters["extra"].state == "finished"
    assert len(table(tmp_path / "run")) == 8


def test_a_sweep_over_stages_in_one_process(data: dict[str, Any], tmp_path: Path) -> None:
    data["sweep"] |= {"sampler": "grid", "trials": None, "search": GRID, "places": 4}
    sweep(data, tmp_path, "one")
    sweep(data | {"pipeline": {"stages": 2}}, tmp_path, "two")
    one, two = (table(tmp_path / name) for name in ("one", "two"))
    assert [row["trial"] for row in one] == [row["trial"] for row in two]
    for row, other in zip(one, two, strict=True):
        assert float(row["eval_loss"]) == pytest.approx(float(other["eval_loss"]), rel=1e-5)
    for name, found in tensors(tmp_path / "one").items():
        torch.testing.assert_close(found, tensors(tmp_path / "two")[name], rtol=1e-5, atol=1e-5)


def test_trials_wait_for_memory(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_memory(monkeypatch)
    data["scheduler"] = {"memory_limit": limit_for(2)}
    crowd = Crowd(3)
    assert sweep(data, tmp_path, reporter=crowd).status == "finished"
    assert [row["state"] for row in table(tmp_path / "run")] == ["finished"] * 8
    together = [{name for name, _ in crowd.steps[i : i + 3]} for i in range(0, 6, 3)]
    assert all(len(names) == 2 for names in together)


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


def test_signal_number_of_an_interrupted_sweep(data: dict[str, Any], tmp_path: Path) -> None:
    result = sweep(data, tmp_path, reporter=Watching({5: interrupt}))
    assert result.status == "interrupted"
    assert result.exit_code == 128 + signal.SIGINT
    assert len(table(tmp_path / "run")) >= 3
