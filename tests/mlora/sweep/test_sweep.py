"""Sweeps at work: places, pruning, trials that fail, and what is left behind."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from limited_runs import Watching, ask, interrupt, limit_for, replace_memory
from mlora.cli.run_status import read_status
from mlora.config.config_file import load_config, resolve_config
from mlora.errors import RunError
from mlora.run.run import resume, train
from mlora.run.validation import validate
from mlora.store.checkpoint import list_checkpoints
from mlora.store.run_folder import RunFolder
from mlora.sweep.ranking import rank_trials, ranked_table
from stage_runs import by_adapter, tensors
from sweep_runs import Crowd, sweep, table
from tiny_run import write_jsonl, write_run

from tests.tolerances import STEADY_EPSILON, assert_same_up_to_rounding

GRID = {"learning_rate": {"choice": [1e-4, 1e-2]}, "lora": {"r": {"choice": [2, 5]}}}


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


@pytest.mark.parametrize("searched", [False, True])
def test_epochs_of_trials_win_over_steps_of_the_defaults(
    data: dict[str, Any], tmp_path: Path, searched: bool
) -> None:
    data["sweep"] |= {"trials": 1, "search": {"learning_rate": {"choice": [1e-3]}}}
    if searched:
        data["sweep"]["search"] = {"num_train_epochs": {"choice": [1.0]}}
    else:
        data["sweep"]["adapter"]["num_train_epochs"] = 1.0
    data["defaults"]["max_steps"] = 2
    sweep(data, tmp_path)
    assert int(table(tmp_path / "run")[0]["step"]) > 2


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


@pytest.mark.parametrize(
    ("metric", "greater"), [("rewards/margins", None), ("eval_logps/chosen", False), ("eval_loss", None)]
)
def test_metrics_of_an_objective_rank_trials(
    data: dict[str, Any], tmp_path: Path, metric: str, greater: bool | None
) -> None:
    pairs = [{"prompt": f"{n} ", "chosen": "ab"[n % 2], "rejected": "cd"[n % 2]} for n in range(8)]
    write_jsonl(tmp_path / "pairs.jsonl", pairs)
    data["datasets"].append({"name": "pairs", "path": "pairs.jsonl", "format": "preference"})
    data["sweep"] |= {"trials": 3, "metric": metric, "sampler": "random", "greater_is_better": greater}
    data["sweep"]["adapter"] |= {"dataset": "pairs", "eval_dataset": "pairs", "objective": "dpo"}
    data["sweep"]["search"] = {"objective": {"beta": {"low": 0.1, "high": 5.0}}}
    data["defaults"] |= {"max_steps": 2}
    validate(resolve_config(data, folder=tmp_path), before := Watching())
    result = sweep(data, tmp_path, reporter=(told := Watching()))
    for lines in (before.lines, told.lines):
        assert any("objectives cannot be compared" in line for line in lines) is (metric == "eval_loss")
    rows, key = table(tmp_path / "run"), f"eval_{metric.removeprefix('eval_')}"
    values = [float(row[key]) for row in rows]
    assert len(set(values)) == 3
    assert values == sorted(values, reverse=metric == "rewards/margins")
    for row in rows:
        found = result.adapters[row["trial"]]
        pairs_of = found.eval_metrics | {"loss": found.eval_loss}
        assert pairs_of[key.removeprefix("eval_")]["after"] == float(row[key])
    newest = torch.load(list_checkpoints(tmp_path / "run" / "checkpoints")[-1], weights_only=True)
    trials = newest["decisions"]["sweep"]["trials"]
    assert {trial["value"] for trial in trials if trial["value"] is not None} <= set(values)
    best = tmp_path / "run" / "adapters" / rows[0]["trial"] / "adapter_model.safetensors"
    assert (tmp_path / "run" / "best" / best.name).read_bytes() == best.read_bytes()


def test_a_metric_that_an_own_loss_lacks(data: dict[str, Any], tmp_path: Path) -> None:
    """The sweep does not begin; a loss that reports it, too, lets it begin, and trials without it stop."""
    (tmp_path / "without.py").write_text("def loss(rows):\n    return -rows.sums(), {'one': rows.sums()}\n")
    data["sweep"] |= {"trials": 2, "metric": "two"}
    data["sweep"]["adapter"]["objective"] = "without:loss"
    message = "sweep.metric: eval_two is not measured; metrics: eval_loss, eval_one"
    with pytest.raises(RunError, match=f"^no trial can be trained: {message}$"):
        sweep(data, tmp_path)
    assert not (tmp_path / "run").exists()
    (tmp_path / "within.py").write_text("def loss(rows):\n    return -rows.sums(), {'two': rows.sums()}\n")
    data["sweep"] |= {"sampler": "grid", "trials": None}
    data["sweep"]["search"] = {"objective": {"choice": ["without:loss", "within:loss"]}}
    stopped, finished = sweep(data, tmp_path).adapters.values()
    assert (stopped.state, stopped.message) == ("stopped", message)
    assert finished.state == "finished"


def test_trials_are_ranked_by_the_weights_that_they_leave(data: dict[str, Any], tmp_path: Path) -> None:
    """Those of their best evaluations; `best` holds those of the best trial's."""
    data["sweep"] |= {"sampler": "grid", "trials": None}
    data["sweep"]["search"] = {"learning_rate": {"choice": [1e-3, 0.05, 0.2]}}
    data["sweep"]["adapter"] |= {"eval_steps": 1, "load_best_model_at_end": True}
    result = sweep(data, tmp_path)
    run, rows = tmp_path / "run", table(tmp_path / "run")
    lowest = {
        name: min(r["eval_loss"] for r in records if "eval_loss" in r and r["step"])
        for name, records in by_adapter(run).items()
    }
    assert any(adapter.saved_step != adapter.step for adapter in result.adapters.values())
    assert {row["trial"]: float(row["eval_loss"]) for row in rows} == lowest
    assert [row["trial"] for row in rows] == sorted(lowest, key=lambda name: lowest[name])
    newest = list_checkpoints(run / "checkpoints")[-1]
    trials = torch.load(newest, weights_only=True)["decisions"]["sweep"]["trials"]
    assert sorted(trial["value"] for trial in trials) == sorted(lowest.values())
    best = run / "adapters" / rows[0]["trial"] / "adapter_model.safetensors"
    assert (run / "best" / best.name).read_bytes() == best.read_bytes()


@pytest.mark.parametrize("form", ["name", "choice of objectives", "choice of names"])
def test_a_loss_of_ones_own_beside_the_yaml(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Found from another folder, by a resume, too; the resolved config holds absolute paths."""
    text = "def loss(rows, scale=1.0):\n    return -scale * rows.sums()\n"
    for name in ("sweep_a", "sweep_b"):
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    own, search = data["sweep"]["adapter"], {"scale": {"choice": [0.5, 2.0]}}
    if form == "name":
        own["objective"] = "sweep_a:loss"
    elif form == "choice of names":
        search["name"] = {"choice": ["sweep_a:loss", "sweep_b:loss"]}
    else:
        search = {"choice": ["sweep_a:loss", {"name": "sweep_b:loss", "scale": 2.0}]}
    data["sweep"] |= {"trials": 2, "sampler": "random", "search": {"objective": search}}
    config = load_config(write_run(tmp_path, data | {"defaults": {"max_steps": 1}}))
    assert config.sweep is not None
    text = str([config.sweep.adapter, config.sweep.search])
    assert text.count("sweep_a:") == text.count("sweep_b:") == 0
    assert f"{tmp_path / 'sweep_a.py'}:loss" in text
    if form == "name":  # the others differ in what is read only
        assert train(config).status == "finished"
        assert resume(tmp_path / "run", settings=["sweep.trials=3"]).status == "finished"
        assert {row["state"] for row in table(tmp_path / "run")} == {"finished"}


def test_trials_that_cannot_train_do_not_end_the_sweep(data: dict[str, Any], tmp_path: Path) -> None:
    targets = ["all-linear", "no_such_layer", ["q_proj", "k_proj"]]  # 1e30 overflows in their product
    search = {"learning_rate": {"choice": [1e-3, 1e30]}, "lora": {"target_modules": {"choice": targets}}}
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


def test_a_sweep_over_stages_in_one_process(data: dict[str, Any], tmp_path: Path) -> None:
    data["sweep"] |= {"sampler": "grid", "trials": None, "search": GRID, "places": 4}
    data["defaults"]["adam_epsilon"] = STEADY_EPSILON
    sweep(data, tmp_path, "one")
    sweep(data | {"pipeline": {"stages": 2}}, tmp_path, "two")
    one, two = (table(tmp_path / name) for name in ("one", "two"))
    assert [row["trial"] for row in one] == [row["trial"] for row in two]
    for row, other in zip(one, two, strict=True):
        assert float(row["eval_loss"]) == pytest.approx(float(other["eval_loss"]), rel=1e-5)
    for name, adapter in tensors(tmp_path / "one").items():
        for key, weight in tensors(tmp_path / "two")[name].items():
            assert_same_up_to_rounding(adapter[key], weight, f"{name}: {key}")


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


def test_signal_number_of_an_interrupted_sweep(data: dict[str, Any], tmp_path: Path) -> None:
    result = sweep(data, tmp_path, reporter=Watching({5: interrupt}))
    assert result.status == "interrupted"
    assert result.exit_code == 128 + signal.SIGINT
    assert {row["state"] for row in table(tmp_path / "run")} == {"unfinished"}


def test_equal_ranks_are_marked(data: dict[str, Any], tmp_path: Path) -> None:
    data["sweep"]["search"] = {"learning_rate": {"choice": [0.0, 1e-30, 5e-2]}}
    data["sweep"] |= {"sampler": "grid", "trials": None}
    data["defaults"] |= {"max_steps": 1, "eval_steps": None}
    sweep(data, tmp_path)
    config = RunFolder(tmp_path / "run").read_config().sweep
    assert config is not None
    rows = ranked_table(rank_trials(RunFolder(tmp_path / "run"), config), config)
    ranks = [row[0] for row in rows[1:]]
    assert sorted(rank.partition(" ")[0] for rank in ranks) == ["1", "2", "3"]
    assert [rank.endswith(" =") for rank in ranks].count(True) == 2


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
    assert f"sweep: 8 of 8 trials started; best so far {best['trial']}, eval_loss" in shown
    assert f"lora.r {best['lora.r']}" in shown


def test_a_trial_that_a_user_ended_has_no_rank(data: dict[str, Any], tmp_path: Path) -> None:
    """Its weights were not evaluated; what was measured before training is not its result."""
    data["sweep"] |= {"trials": 3}
    data["sweep"]["adapter"]["eval_steps"] = None
    stop = {("trial-0", 2): lambda: ask(tmp_path / "run", "stop", "trial-0")}
    result = sweep(data, tmp_path, reporter=Watching(stop)).adapters["trial-0"]
    assert result.state == "finished"
    assert "request" in result.message
    rows = {row["trial"]: row for row in table(tmp_path / "run")}
    assert rows["trial-0"]["eval_loss"] == ""
    assert all(rows[name]["eval_loss"] for name in ("trial-1", "trial-2"))


def test_a_submitted_task_has_no_trials_name(data: dict[str, Any], tmp_path: Path, run: Any) -> None:
    sweep(data, tmp_path)
    lora = {"r": 2, "target_modules": "all-linear"}
    (tmp_path / "task.yaml").write_text(yaml.safe_dump({"name": "trial-9", "dataset": "one", "lora": lora}))
    refused = run("submit", tmp_path / "run", tmp_path / "task.yaml")
    assert refused.exit_code == 1
    assert "trial-9 is reserved for the sweep's trials" in refused.output
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
