"""Sweeps at work: places, pruning, trials that fail, interruptions and kills, and what is left behind."""

from __future__ import annotations

import csv
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from limited_runs import Watching, ask, die, interrupt, limit_for, replace_memory
from mlora.commands.status import read_status
from mlora.config_file import resolve_config
from mlora.errors import RunError
from mlora.queue.task_queue import TaskQueue
from mlora.result import RunResult
from mlora.run import resume, train
from mlora.run_folder import RunFolder
from mlora.sweep.ranking import rank_trials
from mlora.sweep.wish import trials_begun
from stage_runs import by_adapter, tensors
from sweep_data import sweep_data
from tiny_run import lines, weights, write_jsonl, write_run

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
        return [content["trial"] for _, content in trials_begun(queue)]


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
    first = crowd.steps.index(("trial-11", 1))
    assert first > 30
    for position in range(0, first, 3):
        assert len({name for name, _ in crowd.steps[position : position + 3]}) == 3
    for name in (row["trial"] for row in rows if row["state"] == "pruned"):
        assert not (tmp_path / "run" / "adapters" / name).exists()


def to_the_end(data: dict[str, Any], folder: Path, actions: list[tuple[int, Callable[[], object]]]) -> int:
    """Train, and go on after each action, which comes after so many steps of its part; returns the parts."""
    run, parts, status = folder / "run", 0, "begins"
    while status != "finished":
        watching = Watching(dict([actions[parts]] if parts < len(actions) else []))
        try:
            result = resume(run, reporter=watching) if parts else sweep(data, folder, reporter=watching)
            status = result.status
        except ConnectionAbortedError:
            status = "died"
        parts += 1
    return parts


def assert_alike(run: Path, other: Path) -> None:
    """The same trials with the same metrics, weights and table."""
    assert trials_of(run) == trials_of(other)
    assert lines(run) == lines(other)
    assert weights(run) == weights(other)
    tables = [[{k: v for k, v in row.items() if k != "seconds"} for row in table(f)] for f in (run, other)]
    assert tables[0] == tables[1]


@pytest.mark.parametrize("pruner", ["none", "median", "successive_halving", "hyperband"])
def test_interrupted_and_killed_sweeps_end_as_undisturbed_ones(
    data: dict[str, Any], tmp_path: Path, pruner: str
) -> None:
    kwargs = {"n_startup_trials": 2} if pruner == "median" else {}
    data["sweep"] |= {"pruner": pruner, "pruner_kwargs": kwargs}
    data["defaults"]["save_steps"] = 3
    sweep(data, tmp_path, "calm")
    assert to_the_end(data, tmp_path, [(7, die), (9, interrupt), (5, die), (6, die)]) == 5
    assert_alike(tmp_path / "run", tmp_path / "calm")


def test_an_end_of_a_trial_is_saved(data: dict[str, Any], tmp_path: Path) -> None:
    """Whatever `save_steps`, which counts the steps of one trial."""
    data["defaults"]["save_steps"] = 500
    with pytest.raises(ConnectionAbortedError):
        sweep(data, tmp_path, reporter=Watching({("trial-3", 3): die}))
    resume(tmp_path / "run", reporter=(watching := Watching()))
    assert {name for name, _ in watching.steps}.isdisjoint({"trial-0", "trial-1", "trial-2"})
    sweep(data, tmp_path, "calm")
    assert_alike(tmp_path / "run", tmp_path / "calm")


@pytest.mark.parametrize("pruner", ["none", "median"])
def test_a_sweep_goes_on_with_other_places_and_another_policy(
    data: dict[str, Any], tmp_path: Path, pruner: str
) -> None:
    data["defaults"]["save_steps"] = 5
    kwargs = {"n_startup_trials": 2} if pruner == "median" else {}
    data["sweep"] |= {"pruner": pruner, "pruner_kwargs": kwargs}
    with pytest.raises(ConnectionAbortedError):
        sweep(data, tmp_path, reporter=Watching({30: die}))
    path = tmp_path / "run" / "config.yaml"
    text = path.read_text().replace("policy: fcfs", "policy: shortest_first")
    text = text.replace("trials: 8", "trials: 9")
    path.write_text(text.replace("places: 3", "places: 2"))
    assert resume(tmp_path / "run", reporter=(crowd := Crowd(3))).status == "finished"
    assert len(table(tmp_path / "run")) == 9
    assert len({name for name, _ in crowd.steps[-6:]}) <= 2


def test_a_limit_may_come_where_a_new_trial_was_not_yet_evaluated(
    data: dict[str, Any], tmp_path: Path
) -> None:
    """The checkpoint's budget is that of no limit, and the first evaluation comes before a decision."""
    assert sweep(data, tmp_path, reporter=Watching({18: interrupt})).status == "interrupted"
    path = tmp_path / "run" / "config.yaml"
    assert "memory_limit: null" in path.read_text()
    path.write_text(path.read_text().replace("memory_limit: null", "memory_limit: 8GiB"))
    assert resume(tmp_path / "run").status == "finished"
    assert len(table(tmp_path / "run")) == 8


def test_another_search_before_the_first_checkpoint_starts_anew(data: dict[str, Any], tmp_path: Path) -> None:
    data["defaults"]["save_steps"] = 500
    with pytest.raises(ConnectionAbortedError):
        sweep(data, tmp_path, reporter=Watching({4: die}))
    path = tmp_path / "run" / "config.yaml"
    text = path.read_text()
    assert text.count("- 4\n") == 1
    path.write_text(text.replace("- 4\n", "- 5\n"))
    assert resume(tmp_path / "run").status == "finished"
    assert {row["lora.r"] for row in table(tmp_path / "run")} <= {"2", "5", "8"}


def test_more_trials_than_before(data: dict[str, Any], tmp_path: Path) -> None:
    data["sweep"]["trials"] = 2
    sweep(data, tmp_path)
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("trials: 2", "trials: 4"))
    assert resume(tmp_path / "run").status == "finished"
    assert len(table(tmp_path / "run")) == 4


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


def test_what_is_wrong_with_all_trials_is_told_once_before_the_sweep(
    data: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    data["datasets"].append({"name": "empty", "path": "empty.jsonl", "format": "tokens"})
    data["sweep"]["adapter"]["eval_dataset"] = "empty"
    watching = Watching()
    with pytest.raises(RunError, match=r"^no trial can be trained: .*empty\.jsonl"):
        sweep(data, tmp_path, reporter=watching)
    assert not watching.lines


def test_fewer_trials_than_have_begun(data: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConnectionAbortedError):
        sweep(data, tmp_path, reporter=Watching({("trial-4", 2): die}))
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("trials: 8", "trials: 3"))
    assert resume(tmp_path / "run").status == "finished"
    assert len(table(tmp_path / "run")) == 6  # those that had begun


def test_a_trial_that_begins_at_a_checkpoint_is_not_lost(data: dict[str, Any], tmp_path: Path) -> None:
    """The decision comes after the checkpoint, at its iteration; a kill before the next one."""
    data["defaults"]["save_steps"] = 500
    run = tmp_path / "run"
    assert sweep(data, tmp_path, reporter=Watching({6: interrupt})).status == "interrupted"
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("places: 3", "places: 4"))
    with pytest.raises(ConnectionAbortedError):
        resume(run, reporter=Watching({2: die}))
    assert resume(run).status == "finished"
    assert len(table(run)) == 8


def test_the_outcome_is_written_where_it_is_missing(data: dict[str, Any], tmp_path: Path) -> None:
    data["sweep"]["trials"] = 2
    sweep(data, tmp_path)
    run = tmp_path / "run"
    shutil.rmtree(run / "best")
    (run / "sweep.csv").unlink()
    assert resume(run).status == "finished"
    assert len(table(run)) == 2
    assert (run / "best" / "adapter_model.safetensors").is_file()


def test_exact_match_is_what_trials_are_ranked_by(data: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    pairs = [{"prompt": f"{n} ", "completion": "a" if n % 2 else "b"} for n in range(8)]
    write_jsonl(tmp_path / "pairs.jsonl", pairs)
    data["datasets"].append({"name": "pairs", "path": "pairs.jsonl", "format": "prompt_completion"})
    data["sweep"] |= {"trials": 4, "metric": "eval_exact_match"}
    data["sweep"]["adapter"] |= {"dataset": "pairs", "eval_dataset": "pairs", "eval_exact_match": True}
    actions: dict[Any, Callable[[], object]] = {("trial-0", 2): lambda: ask(run, "cancel", "trial-0")}
    result = sweep(data, tmp_path, reporter=Watching(actions))
    rows = table(run)
    shares = [float(row["eval_exact_match"]) for row in rows if row["state"] == "finished"]
    assert len(shares) == 3
    assert shares == sorted(shares, reverse=True)
    for row in rows[:3]:
        assert result.adapters[row["trial"]].eval_exact_match["after"] == float(row["eval_exact_match"])
        assert result.adapters[row["trial"]].eval_loss["after"] == float(row["eval_loss"])
    assert (rows[3]["state"], rows[3]["eval_exact_match"]) == ("cancelled", "")


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


def test_a_user_cancels_and_pauses_trials(data: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    actions: dict[Any, Callable[[], object]] = {
        ("trial-0", 2): lambda: ask(run, "cancel", "trial-0"),
        ("trial-1", 2): lambda: ask(run, "pause", "trial-1"),
        ("trial-2", 4): lambda: ask(run, "unpause", "trial-1"),
    }
    watching = Watching(actions)
    assert sweep(data, tmp_path, reporter=watching).status == "finished"
    steps = watching.steps
    between = steps[steps.index(("trial-1", 2)) : steps.index(("trial-1", 3))]
    assert ("trial-2", 4) in between
    assert ("trial-4", 1) not in between  # a paused trial keeps its place
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
    again = run("resume", tmp_path / "run")
    assert again.exit_code == 0
    assert len(table(tmp_path / "run")) == 8
    shown = again.stdout.splitlines()
    title = next(place for place, line in enumerate(shown) if line.startswith("adapter "))
    assert shown[title + 1].split()[:3] == ["extra", "finished", "2/2"]
    assert shown[title - 1].split()[1].startswith("trial-")  # the last of the trials' own table


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
    assert {row["state"] for row in table(tmp_path / "run")} == {"unfinished"}


def test_a_queue_that_is_gone(data: dict[str, Any], tmp_path: Path) -> None:
    """It holds what the trials are: without them the sweep would end at once."""
    data["defaults"]["save_steps"] = 2
    assert sweep(data, tmp_path, reporter=Watching({9: interrupt})).status == "interrupted"
    queue = tmp_path / "run" / "queue.sqlite"
    kept = queue.read_bytes()
    queue.unlink()
    with pytest.raises(
        RunError, match=r"queue.sqlite: lacks trial-0, trial-1, trial-2, which the checkpoint"
    ):
        resume(tmp_path / "run")
    queue.write_bytes(kept)
    assert resume(tmp_path / "run").status == "finished"
    assert len(table(tmp_path / "run")) == 8
