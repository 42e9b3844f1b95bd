"""Sweeps that were interrupted, killed or changed go on, and lose nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from limited_runs import Watching, die, interrupt
from mlora.config.config_file import resolve_config
from mlora.errors import RunError
from mlora.objectives import function_file
from mlora.run.run import resume, train
from mlora.store.queue import TaskQueue
from mlora.sweep.ranking import trials_begun
from sweep_runs import Crowd, sweep, table
from tiny_run import lines, weights


def trials_of(run: Path) -> list[dict[str, Any]]:
    """What was proposed, in its order."""
    with TaskQueue(run / "queue.sqlite") as queue:
        return [content["trial"] for _, content in trials_begun(queue)]


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


@pytest.mark.parametrize(
    "pruner",
    [
        "median",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("none", "successive_halving", "hyperband")
        ),
    ],
)
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


@pytest.mark.parametrize("pruner", [pytest.param("none", marks=pytest.mark.nightly), "median"])
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
    del data["sweep"]["search"]["lora"]  # of one rank: what it needs of memory is found once
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
    assert resume(tmp_path / "run", settings=["sweep.trials=4"]).status == "finished"
    assert len(table(tmp_path / "run")) == 4
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("trials: 4", "trials: 5"))
    assert resume(tmp_path / "run").status == "finished"
    assert len(table(tmp_path / "run")) == 5


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


def test_a_loss_that_was_edited_between_its_trials(data: dict[str, Any], tmp_path: Path) -> None:
    """None of them is alive at the checkpoint."""
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text(f"import of_{name}\ndef loss(rows):\n    return -rows.sums()\n")
        (tmp_path / f"of_{name}.py").touch()
    data["sweep"] |= {"places": 1, "sampler": "grid", "trials": None}
    data["sweep"]["adapter"]["objective"] = "other:loss"
    choice = {"choice": ["one:loss", "other:loss"]}
    data["sweep"]["search"] = {"learning_rate": {"choice": [1e-3, 2e-3]}, "objective": {"name": choice}}
    told = Watching({("trial-2", 2): interrupt})
    assert sweep(data, tmp_path, reporter=told).status == "interrupted"
    for path in (tmp_path / "of_other.py", tmp_path / "other.py"):
        before = path.read_text()
        path.write_text(f"{before}more = 2\n")
        function_file._folder.cache_clear()  # as in another process
        with pytest.raises(RunError, match=r"sweep: the loss .*/other\.py:loss changed since the checkpoint"):
            resume(tmp_path / "run")
        path.write_text(before)
    function_file._folder.cache_clear()
    assert resume(tmp_path / "run").status == "finished"
    assert len(table(tmp_path / "run")) == 4


def test_a_loss_that_was_edited_before_another_sweep(data: dict[str, Any], tmp_path: Path) -> None:
    """This process has read the old one."""
    path = tmp_path / "again.py"
    path.write_text("def loss(rows):\n    return -rows.sums()\n")
    data["sweep"] |= {"places": 1, "sampler": "grid", "trials": None}
    data["sweep"]["search"] = {"objective": {"choice": ["cross_entropy", "again:loss"]}}
    assert sweep(data, tmp_path).status == "finished"
    path.write_text("def loss(rows):\n    return -5 * rows.sums()\n")
    with pytest.raises(RunError, match="again"):
        sweep(data, tmp_path, "other")


@pytest.mark.parametrize("what", ["data", "adapter_model.safetensors", "adapter_config.json"])
def test_what_its_trials_begin_with_changes(what: str, data: dict[str, Any], tmp_path: Path) -> None:
    """None of the trials is alive at the checkpoint."""
    of_sweep = data["sweep"]["adapter"]
    first = {
        "name": "a",
        "dataset": of_sweep["dataset"],
        "max_steps": 1,
        "lora": of_sweep.pop("lora") | {"r": 2},
    }
    start = {key: value for key, value in data.items() if key != "sweep"} | {"adapters": [first]}
    train(resolve_config(start | {"output_dir": "start"}, folder=tmp_path))
    folder = tmp_path / "start" / "adapters" / "a"
    data["sweep"] |= {"places": 1, "sampler": "grid", "trials": None}
    data["sweep"]["adapter"]["init_from"] = str(folder)
    data["sweep"]["search"] = {"learning_rate": {"choice": [1e-3, 2e-3, 3e-3]}}
    assert sweep(data, tmp_path, reporter=Watching({("trial-1", 2): interrupt})).status == "interrupted"
    path = tmp_path / f"{of_sweep['dataset']}.jsonl" if what == "data" else folder / what
    kept = path.read_bytes()
    path.write_bytes(kept + (b" " if what != "data" else kept.splitlines(keepends=True)[0]))
    with pytest.raises(RunError, match=r"sweep: .* changed since the checkpoint, and its trials could not"):
        resume(tmp_path / "run")
    path.write_bytes(kept)
    assert resume(tmp_path / "run").status == "finished"


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
